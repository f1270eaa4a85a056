"""A run that is struck at any numbered point of its writing ends, resumed, with the same bits.

`crashpoints.c` is compiled and preloaded into a process that has everything imported. It forks a
child for each point; the child arms the library and is `fedglad run`. At the point the process is
killed, a call fails, or a write is cut short and the process killed. Another child, without any of
that, goes on with `--resume`.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_support import environment, outcome

from fedglad.runs import check

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent

SERVER = """
import ctypes, json, os, sys, tempfile
import torch
from fedglad.cli import app
import fedglad.cli.fetching, fedglad.cli.progress, fedglad.runs.running, safetensors.torch
library = ctypes.CDLL(None)
library.crashpoints_trace.restype = ctypes.c_char_p
library.crashpoints_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_char]
torch.set_num_threads(1)

def play(args):
    try:
        app(args, standalone_mode=True)
    except SystemExit as end:
        return end.code or 0
    return 0

with tempfile.TemporaryDirectory() as warm:  # loads what is loaded when it is used
    args = ["run", "digits", "--set", "rounds=1", "--set", "engine.name=serial", "--json"]
    sys.stdout, kept = open(os.devnull, "w"), sys.stdout
    play([*args, "--out", os.path.join(warm, "run")])
    sys.stdout = kept
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    there, here = os.pipe()
    if (child := os.fork()) == 0:
        said = os.open(job["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1), os.dup2(said, 2)
        library.crashpoints_arm(job["folder"].encode(), job["at"], job["how"].encode())
        code = 70
        try:
            code = play(job["args"])
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            trace = library.crashpoints_trace()
            sys.stdout.flush(), sys.stderr.flush()
            os.write(here, trace)
            os._exit(code)
    os.close(here)
    with os.fdopen(there) as pipe:
        trace = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps({"code": code, "trace": trace}), flush=True)
"""

TINY: dict[str, Any] = {
    "rounds": 3,
    "checkpoint_every": 1,
    "data.clients": 4,
    "model.name": "softmax",
    "model.features": 64,
    "client.epochs": 1,
    "client.batch_size": 512,
    "sampler.clients_per_round": 2,
    "engine.name": "serial",
}
SCAFFOLD = {"client.name": "scaffold", "client.optimizer": "sgd", "client.clients": 4}
MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaffold": SCAFFOLD,
    "scaffold, seldom saved": {**SCAFFOLD, "rounds": 4, "checkpoint_every": 2},
    "vrl-sgd": {"client.name": "vrl-sgd"},
    "adafl": {"sampler.name": "adafl"},
    "similar clients": {"sampler.name": "clustered", "sampler.by": "similarity"},
    "validation, ema": {"data.validation": 0.2, "average.name": "ema", "data.partition": "iid"},
    "clients tested, stopped": {
        "data.validation": 0.2,
        "rounds": 6,
        "eval_clients": "all",
        "eval_clients_every": 1,
        "stop_after": 1,  # after two rounds
    },
    "adam": {"server.name": "adam", "server.lr": 0.01},
    "momentum, fedadp": {"server.name": "momentum", "weighting.name": "fedadp"},
    "median": {"filter.name": "median", "sampler.clients_per_round": 3},
    "multi-krum": {"filter.name": "multi-krum", "filter.f": 0, "sampler.clients_per_round": 4},
}
SAMPLED = 12  # points of each
KINDS = {"k": "killed", "s": "cut short and killed", "e": "failed with EIO", "n": "full"}


class Machine:
    """The process that forks runs; it has everything loaded."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(), "LD_PRELOAD": str(library)},
        )
        assert self.process.stdout
        assert self.process.stdout.readline() == "ready\n"

    def run(
        self, out: Path, settings: dict[str, Any], *more: str, at: int = 0, how: str = "k"
    ) -> tuple[int, str, str]:
        """The exit code, a letter for each point, and what was printed."""
        given = [text for k, v in settings.items() for text in ("--set", f"{k}={v}")]
        args = ["run", "digits", *given, "--out", str(out), "--json", *more]
        said = self.folder / "said.txt"
        job = {"args": args, "folder": str(out), "at": at, "how": how, "said": str(said)}
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        done = json.loads(self.process.stdout.readline())
        return done["code"], done["trace"], said.read_text()

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the crash points need a C compiler, cc, and Linux")
    folder = tmp_path_factory.mktemp("crashes")
    library = folder / "crashpoints.so"
    options = ["-O2", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([compiler, *options, str(HERE / "crashpoints.c"), "-ldl"], check=True)
    made = Machine(library, folder)
    yield made
    made.close()


def undisturbed(
    machine: Machine, folder: Path, settings: dict[str, Any], *more: str
) -> tuple[Any, str]:
    """What a run leaves, and its points."""
    code, trace, said = machine.run(folder, settings, *more)
    assert code == 0, said
    assert check(folder).good
    return outcome(folder), trace


def strike(
    machine: Machine,
    folder: Path,
    settings: dict[str, Any],
    wanted: Any,
    points: Sequence[Any],
    *more: str,
) -> dict[str, int]:
    """Strikes a run at each point, goes on, and compares; returns how the runs ended."""
    ends = dict.fromkeys(KINDS, 0)
    wrong: list[str] = []
    for at, how in points:
        out = folder / f"{at}{how}"
        code, _, said = machine.run(out, settings, *more, at=at, how=how)
        ends[how] += code != 0
        where = f"point {at}, {KINDS[how]}"
        if code not in ((-9, 0) if how in "ks" else (0, 2)) or "Traceback" in said:
            wrong.append(f"{where}: exit code {code}: {said[-400:]}")
        code, _, said = machine.run(out, settings, *more, "--resume")
        if code or "Traceback" in said:
            wrong.append(f"{where}, resumed: exit code {code}: {said[-400:]}")
        elif outcome(out) != wanted:
            wrong.append(f"{where}, resumed: another result")
        elif [file for file in check(out).files if file.state != "good"]:
            wrong.append(f"{where}, resumed: {check(out).verdict}")
        shutil.rmtree(out, ignore_errors=True)
    assert not wrong, f"{len(wrong)} of {len(points)}:\n" + "\n".join(wrong[:10])
    return ends


@pytest.mark.parametrize("how", ["killed", "cut short", "failed"])
def test_every_point_of_a_run_with_memories(machine: Machine, tmp_path: Path, how: str):
    settings = TINY | SCAFFOLD | {"rounds": 2}
    wanted, trace = undisturbed(machine, tmp_path / "whole", settings)
    assert {*"owfru"} <= {*trace}  # else the library sees little of what happens
    assert len(trace) > 80
    points = [(at, "k") for at in range(1, len(trace) + 1)]
    assert not (tmp_path / "whole" / "memories").exists()  # their removal has points, too
    if how == "cut short":
        points = [(at, "s") for at, _ in points if trace[at - 1] == "w"]
    elif how == "failed":
        points = [(at, "en"[at % 2]) for at, _ in points]
    ends = strike(machine, tmp_path, settings, wanted, points)
    # A file that could not be removed may be let be.
    assert sum(ends.values()) >= len(points) - (trace.count("u") if how == "failed" else 0)


@pytest.mark.parametrize("name", MORE)
def test_some_points_of_other_runs(machine: Machine, tmp_path: Path, name: str):
    settings = TINY | MORE[name]
    keep = ("--keep-state",)  # the checkpoint and the memories are compared
    wanted, trace = undisturbed(machine, tmp_path / "whole", settings, *keep)
    at = random.Random(name).sample(range(1, len(trace) + 1), SAMPLED)
    points = [(point, "ksen"[k % 4]) for k, point in enumerate(at)]
    strike(machine, tmp_path, settings, wanted, points, *keep)


def test_every_point_at_the_end_of_a_run_that_goes_on_for_more_rounds(
    machine: Machine, tmp_path: Path
):
    """Its folder is the same: the summary goes, the settings change, rounds are added."""
    settings = TINY | SCAFFOLD | {"rounds": 1}
    longer = settings | {"rounds": 2}
    wanted, _ = undisturbed(machine, tmp_path / "whole", longer, "--keep-state")
    undisturbed(machine, tmp_path / "short", settings, "--keep-state")
    shutil.copytree(tmp_path / "short", tmp_path / "longer")
    _, trace, _ = machine.run(tmp_path / "longer", longer, "--keep-state", "--resume")
    assert outcome(tmp_path / "longer") == wanted
    points = [(at, "kesn"[at % 4]) for at in range(1, len(trace) + 1, 3)]
    for at, how in points:
        shutil.copytree(tmp_path / "short", tmp_path / f"{at}{how}")
    strike(machine, tmp_path, longer, wanted, points, "--keep-state", "--resume")


def test_the_library_strikes_a_run_that_is_armed_by_its_environment(
    machine: Machine, tmp_path: Path
):
    """The same in a process that was not forked: `fedglad run` from its first line on."""
    out = tmp_path / "run"
    armed = {"CRASHPOINTS_FOLDER": str(out), "CRASHPOINTS_AT": "5", "CRASHPOINTS_HOW": "k"}
    library = {"LD_PRELOAD": str(machine.folder / "crashpoints.so")}
    script = "from fedglad.cli import app; app()"
    args = ["run", "digits", "--out", str(out), "--set", "engine.name=serial"]
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env={**os.environ, **library, **armed},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == -9
    assert out.is_dir()
