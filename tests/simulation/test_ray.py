"""The engine ray: the same bits on any cluster, and what happens when parts of it fail."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_support import Nodes
from run_support import alive, cli, job, kept, outcome, packed, play, start, tiny_data, until
from torch import nn

from fedglad import Server
from fedglad.clients.method import Plain
from fedglad.config.schema import load
from fedglad.data.digits import Digits
from fedglad.models.softmax import SoftmaxRegression
from fedglad.records import POSITIONS
from fedglad.server.totals import Block
from fedglad.simulation.engines.ray import RayEngine
from fedglad.simulation.engines.settings import Ray, Serial
from fedglad.simulation.engines.trainer import About

pytestmark = pytest.mark.slow

BRIEF: dict[str, Any] = {
    "rounds": 3,
    "data.clients": 110,
    "model.name": "mlp",
    "model.features": 64,
    "client.epochs": 1,
    "client.batch_size": 4,
    "server.name": "adam",
    "server.lr": 0.01,
    "average.name": "ema",
    "sampler.clients_per_round": 100,
}
KINDS: dict[str, dict[str, Any]] = {
    "scaffold": {**BRIEF, "client.name": "scaffold"},
    "adafl": {**BRIEF, "sampler.name": "adafl", "sampler.clients_per_round": 40},
}


def ray(nodes: Nodes, **settings: Any) -> dict[str, Any]:
    given = {f"engine.{name}": value for name, value in settings.items()}
    return {"engine.name": "ray", "engine.address": nodes.address, **given}


def trainers(nodes: Nodes) -> list[int]:
    """The processes of the engine's workers on the nodes."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::Trainer" in (entry / "cmdline").read_bytes():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                command = (entry.parent / parent / "cmdline").read_bytes()
                found += [int(entry.name)] * (str(nodes.folder).encode() in command)
        except OSError:
            continue
    return found


@dataclass
class Lagging:
    """Digits whose clients take some seconds to read, and one of which misbehaves."""

    clients: int = 120
    seconds: float = 0.0
    raises: int = -1
    hangs: int = -1
    dies: int = -1
    survives: int = 99  # after so many deaths it does not die any more
    folder: str = ""  # where its deaths are counted
    inner: Any = field(default=None)

    def __post_init__(self) -> None:
        self.inner = self.inner or Digits(clients=self.clients, partition="iid").load_federation()

    def size(self, k: int) -> int:
        return self.inner.size(k)

    def client(self, k: int) -> Any:
        time.sleep(self.seconds)
        if k == self.raises:
            raise KeyError("no such file")
        if k == self.hangs and self.folder and (Path(self.folder) / "armed").exists():
            time.sleep(100)
        if k == self.dies and self.folder:
            deaths = len(list(Path(self.folder).glob("death*")))
            if (Path(self.folder) / "armed").exists() and deaths < self.survives:
                (Path(self.folder) / f"death{deaths}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return self.inner.client(k)

    def test(self) -> Any:
        return self.inner.test()

    def labels(self, k: int) -> Any:
        return self.inner.labels(k)


@contextmanager
def meanwhile(act: Callable[[], Any], after: float) -> Generator[None]:
    """Does something in another thread after some seconds, and waits for it at the end."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            time.sleep(after)
            act()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    if failed:
        raise failed[0]


# -------------------------------------------------------------------------------------- the bits


@pytest.mark.parametrize("kind", KINDS)
def test_one_node_or_three_give_the_bits_of_serial_and_local(nodes: Nodes, kind: str):
    given = KINDS[kind]
    serial = play({**given, "engine.name": "serial"})
    assert play({**given, "engine.workers": 2}) == serial
    for count in (1, 3):
        nodes.only(count)
        assert play({**given, **ray(nodes)}) == serial


def test_whole_blocks_come_back_as_their_sums(three: Nodes):
    """With 7 blocks for 3 workers each sends sums; the last block has the 4 clients left over."""
    data = Lagging()
    with closing(Ray(address=three.address, workers=3).start(job(data))) as engine:
        rule = serial_rule()
        zeros = packed(SoftmaxRegression(features=64).build())
        groups = list(engine.train(0, range(100), zeros, {}, rule))
        blocks = [group for group in groups if isinstance(group, Block)]
        assert len(blocks) == len(groups) == 7
        assert [block.clients for block in blocks] == [POSITIONS] * 6 + [4]
        single = list(engine.train(0, range(48), zeros, {}, rule))  # too few blocks for all
        assert not any(isinstance(group, Block) for group in single)


def serial_rule() -> Any:
    return Server(SoftmaxRegression(features=64).build()).rule()


# ------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("cohort", [100, 40], ids=["sums", "updates"])
def test_a_node_and_a_worker_that_are_killed_change_no_bit(three: Nodes, cohort: int):
    given = {**BRIEF, "rounds": 2, "sampler.clients_per_round": cohort, "client.name": "scaffold"}
    data = Lagging()
    serial = play({**given, "engine.name": "serial"}, data=data)
    lagging = Lagging(seconds=0.08 if cohort == 100 else 0.2, inner=data.inner)
    victim = three.others[0]
    killed: list[int] = []

    def act() -> None:
        three.kill(victim)
        killed.append(until(lambda: trainers(three))[0])
        os.kill(killed[0], signal.SIGKILL)

    with meanwhile(act, 5.0):
        again = play({**given, **ray(three)}, data=lagging)
    assert killed
    assert again == serial


def test_workers_follow_the_cluster_as_nodes_come(nodes: Nodes):
    nodes.only(1)
    data = Lagging()
    with closing(Ray(address=nodes.address).start(job(data))) as engine:
        zeros = packed(SoftmaxRegression(features=64).build())
        first = kept(engine.train(0, range(8), zeros, {}))
        assert len(engine.hands) == 1
        nodes.only(3)
        until(lambda: (kept(engine.train(0, range(8), zeros, {})), len(engine.hands) == 3)[1])
        assert kept(engine.train(0, range(8), zeros, {})) == first


def test_clients_that_fail_are_recorded_as_in_local(three: Nodes, tmp_path: Path):
    zeros = packed(SoftmaxRegression(features=64).build())
    cohort = range(12)
    with closing(Serial().start(job(tiny := Lagging(raises=3)))) as engine:
        reference = kept(engine.train(0, cohort, zeros, {}))
    assert reference[3] == (3, "KeyError: 'no such file'")
    with closing(Ray(address=three.address).start(job(tiny))) as engine:
        assert kept(engine.train(0, cohort, zeros, {})) == reference

    data = Lagging(dies=5, folder=str(tmp_path), inner=tiny.inner)
    with closing(Serial().start(job(data))) as engine:
        whole = kept(engine.train(0, cohort, zeros, {}))
    with closing(Ray(address=three.address).start(job(data))) as engine:
        (tmp_path / "armed").touch()
        result = kept(engine.train(0, cohort, zeros, {}))
        assert result[5] == (5, "its worker died 3 times")
        assert [*result[:5], *result[6:]] == [*whole[:5], *whole[6:]]
        for mark in tmp_path.glob("death*"):
            mark.unlink()
        assert kept(engine.train(0, cohort, zeros, {}))[5] == result[5]

    (tmp_path / "armed").unlink()
    data = Lagging(hangs=2, folder=str(tmp_path), inner=tiny.inner)
    timed = Ray(address=three.address, client_timeout=2.0)
    with closing(timed.start(job(data))) as engine:
        (tmp_path / "armed").touch()
        began = time.monotonic()
        result = kept(engine.train(0, cohort, zeros, {}))
        assert time.monotonic() - began < 20
        assert result[2] == (2, "no answer within 2 s")
        assert [*result[:2], *result[3:]] == [*whole[:2], *whole[3:]]


def test_a_server_that_raises_leaves_the_engine_usable(three: Nodes):
    data, zeros = Lagging(), packed(SoftmaxRegression(features=64).build())
    with closing(Ray(address=three.address).start(job(data))) as engine:
        reference = kept(engine.train(0, range(9), zeros, {}))
        groups = engine.train(0, range(100), zeros, {})
        next(groups)
        del groups
        assert kept(engine.train(0, range(9), zeros, {})) == reference


def test_tensors_of_models_with_buffers_and_memories_travel(three: Nodes):
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.norm = nn.BatchNorm1d(64)
            self.dense = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dense(self.norm(x.flatten(1)))

    given = {**BRIEF, "client.name": "scaffold", "client.batch_size": 8, "rounds": 2}
    serial = play({**given, "engine.name": "serial"}, model=Normed())
    assert play({**given, **ray(three)}, model=Normed()) == serial


OWN = """
from dataclasses import dataclass

from fedglad.clients import Plain


@dataclass(frozen=True, kw_only=True)
class Pulled(Plain):
    \"\"\"A gradient that also pulls to where the round began.\"\"\"

    pull: float = 0.1

    def correct(self, grad, w, theta, memory, sent):
        grad.add_(w - theta, alpha=self.pull)
"""


def test_own_code_that_only_the_driver_has(
    three: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "only_here.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    given = {**BRIEF, "client.name": "only_here:Pulled", "rounds": 2}
    plain = play({**BRIEF, "rounds": 2, "engine.name": "serial"})
    serial = play({**given, "engine.name": "serial"})
    assert serial != plain
    assert play({**given, **ray(three)}) == serial


# ----------------------------------------------------------------------------- runs as commands

RUN = [
    *("run", "digits", "--quiet", "--keep-state"),
    *(f"--set={key}={value}" for key, value in BRIEF.items() if key != "rounds"),
    *("--set=rounds=10", "--set=client.name=scaffold"),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """What the run leaves in one process, never stopped."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    done = cli(*RUN, "--set=engine.name=serial", "--out", folder)
    assert done.returncode == 0, done.stderr
    return outcome(folder)


def test_a_driver_that_is_killed_goes_on_with_another_number_of_nodes(
    nodes: Nodes, tmp_path: Path, reference: tuple[Any, ...]
):
    nodes.only(3)
    engine = ["--set=engine.name=ray", f"--set=engine.address={nodes.address}"]
    folder = tmp_path / "ray"
    driver = start(*RUN, *engine, "--out", folder)
    until(lambda: lines(folder) >= 3, 120)
    driver.kill()
    driver.communicate()
    until(lambda: not trainers(nodes), 30)
    nodes.only(2)
    done = cli(*RUN, *engine, "--out", folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert outcome(folder) == reference


def test_ctrl_c_saves_and_a_run_goes_on_elsewhere(tmp_path: Path, reference: tuple[Any, ...]):
    folder, before = tmp_path / "ray", leftovers()
    driver = start(*RUN, "--set=engine.name=ray", "--out", folder)
    until(lambda: lines(folder) >= 2, 120)
    driver.send_signal(signal.SIGINT)
    _, err = driver.communicate(timeout=60)
    assert driver.returncode == 130, err
    assert "--resume" in err
    until(lambda: leftovers() == before, 30)  # the cluster of its own has gone with its folder
    done = cli(*RUN, "--set=engine.name=serial", "--out", folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert outcome(folder) == reference


def test_an_own_cluster_goes_when_its_driver_is_killed(tmp_path: Path):
    before = leftovers()
    driver = start(*RUN, "--set=engine.name=ray", "--out", tmp_path / "run")
    until(lambda: lines(tmp_path / "run") >= 1, 120)
    made = leftovers() - before
    assert len(made) == 1
    (folder,) = made
    inside = processes(folder)
    assert inside
    assert listening(inside) == {"127.0.0.1"}
    driver.kill()
    driver.communicate()
    until(lambda: leftovers() == before, 60)
    until(lambda: not any(map(alive, inside)), 60)


def test_a_cluster_that_shrinks_to_nothing_stops_the_run_with_a_checkpoint(
    nodes: Nodes, tmp_path: Path, reference: tuple[Any, ...]
):
    """The node that is left has no CPU: nobody can train there."""
    nodes.only(1)
    folder = tmp_path / "run"
    engine = ["--set=engine.name=ray", f"--set=engine.address={nodes.address}"]
    engine += ["--set=engine.patience=4", "--set=engine.cpus=1"]
    driver = start(*RUN, *engine, "--out", folder)
    until(lambda: lines(folder) >= 2, 120)
    with occupied(nodes):
        for pid in trainers(nodes):
            os.kill(pid, signal.SIGKILL)
        _, err = driver.communicate(timeout=120)
    assert driver.returncode == 130, err
    assert "no worker could be started for 4 s" in err
    assert "--resume" in err
    assert "Traceback" not in err
    saved = lines(folder)
    assert saved >= 2
    done = cli(*RUN, "--set=engine.name=serial", "--out", folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert outcome(folder) == reference


@contextmanager
def occupied(nodes: Nodes) -> Generator[None]:
    """Somebody else asks for all CPUs, and gets each that becomes free."""
    script = (
        "import sys, time\n"
        "from fedglad.core.cluster import Cluster\n"
        "ray = Cluster(sys.argv[1]).ray\n"
        "sit = ray.remote(num_cpus=1)(lambda: time.sleep(60))\n"
        "print('asked', flush=True)\n"
        "ray.get(sit.remote())\n"
    )
    command = [sys.executable, "-c", script, nodes.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "asked\n"
        time.sleep(1.0)
        try:
            yield
        finally:
            other.kill()


def lines(folder: Path) -> int:
    """How many rounds a run has written."""
    path = folder / "rounds.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


def leftovers() -> set[str]:
    return {str(path) for path in Path("/tmp").glob("fedglad-ray-*")}


def processes(folder: str) -> list[int]:
    """Those whose command names a folder."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [int(entry.parent.name)] * (folder.encode() in entry.read_bytes())
        except OSError:
            continue
    return found


def listening(pids: list[int]) -> set[str]:
    """The addresses at which processes wait for connections, by /proc/net."""
    inodes: set[str] = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                raw = bytes.fromhex(local.partition(":")[0])
                words = [raw[k : k + 4][::-1] for k in range(0, len(raw), 4)]
                address = ip_address(b"".join(words))
                mapped = getattr(address, "ipv4_mapped", None)
                found.add(str(mapped or address))
    return found


# ------------------------------------------------------------------------------- data and mistakes


def test_a_node_with_other_data_is_refused(three: Nodes):
    """Each node opens the data set itself: here it is another one than the driver's."""
    given = job(original())
    with pytest.raises(ValueError, match=r"the data on .* are other ones than here .*fedglad data"):
        Ray(address=three.address).start(replace(given, source=another))


def test_a_node_without_the_data_says_what_is_missing(three: Nodes):
    """A node fetches a known data set by itself; this one has nowhere to put it."""
    given = job(Digits(clients=20).load_federation())
    with pytest.raises(ValueError, match=r"a worker cannot begin: .*mnist could not be written"):
        Ray(address=three.address).start(replace(given, source=missing))


def test_another_type_of_cpu_is_told(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    here = About.here
    monkeypatch.setattr(About, "here", lambda data: replace(here(data), cpu="Another Type"))
    given = job(original())
    with closing(Ray(address=nodes.address).start(replace(given, source=original))):
        (said,) = [r.getMessage() for r in caplog.records if "type of CPU" in r.getMessage()]
    assert "the last bits of the results may differ" in said


def test_a_gpu_that_pytorch_does_not_see_is_refused(nodes: Nodes):
    """Ray believes what a node says it has; the workers share it by halves, and find none."""
    nodes.only(1)
    gpu = nodes.add(gpus=1)
    try:
        with pytest.raises(ValueError, match=r"Ray gave a GPU of .* PyTorch sees none there"):
            Ray(address=nodes.address, gpus=0.5, cpus=0.5).start(job(tiny_data(3)))
    finally:
        nodes.kill(gpu)


@pytest.mark.parametrize(
    ("gpus", "free", "expected"),
    [
        (0.5, {"CPU": 8, "GPU": 1}, 2),
        (0.25, {"CPU": 3, "GPU": 2}, 3),
        (1.0, {"CPU": 8}, 0),
        (0.0, {"CPU": 2, "GPU": 4}, 2),
    ],
)
def test_there_are_as_many_workers_as_cpus_and_gpus_allow(
    gpus: float, free: dict[str, float], expected: int
):
    """A Ray that only counts, in the place of machines with GPUs."""
    engine = object.__new__(RayEngine)
    asked: list[bool] = []
    engine.settings, engine.hands, engine.job_ref = Ray(gpus=gpus), [], None

    class Actor:
        class about:
            remote = staticmethod(object)

    class Counting:
        cluster_resources = available_resources = staticmethod(lambda: free)

    class Make:
        @staticmethod
        def remote(job: Any, *, gpu: bool) -> type[Actor]:
            asked.append(gpu)
            return Actor

    engine.ray, engine.make = Counting(), Make()
    engine._hire()
    assert asked == [gpus > 0] * expected


def original() -> Any:
    return Digits(clients=20, seed=1).load_federation()


def another() -> Any:
    return Digits(clients=20, seed=2).load_federation()


def missing() -> Any:
    """What a machine does that has no MNIST."""
    os.environ["FEDGLAD_CACHE"] = "/dev/null/cache"
    return load("mnist", {})[1].federation()


def test_a_model_that_cannot_be_trained_and_a_cluster_that_is_not_there_are_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10, dtype=torch.float64))
    with pytest.raises(ValueError, match="one dtype, float32 or float64"):
        Ray().start(job(tiny_data(3), model))
    with pytest.raises(ValueError, match=r"no Ray cluster answers at '127\.0\.0\.1:9'"):
        Ray(address="127.0.0.1:9").start(job(tiny_data(3), client=Plain()))
