"""Trackers: a real run written with the real libraries and read back with their own readers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedglad.cli.track import app
from fedglad.config.schema import load
from fedglad.report import trackers
from fedglad.report.trackers import (
    NAMES,
    REGISTRY,
    NewRounds,
    TrackError,
    Tracking,
    follow,
    track,
)
from fedglad.report.trackers.names import Names, hyperparameters, scalars, summary_scalars
from fedglad.runs import Run, execute
from fedglad.runs.line import clean
from fedglad.trust import Alarm
from tests.report import made

ROOT = Path(__file__).parents[2]
DIGITS = {
    "model.name": "softmax",
    "model.features": 64,
    "client.epochs": 1,
    "sampler.clients_per_round": 3,
    "engine.name": "serial",
    "rounds": 6,
    "eval_every": 2,
}
every_tracker = pytest.mark.parametrize("to", REGISTRY)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of six rounds."""
    folder = tmp_path_factory.mktemp("runs") / "digits-six"
    execute("digits", load("digits", DIGITS)[1], out=folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B keeps logs there."""
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@dataclass
class Found:
    """A run as a tracker's own reader has it."""

    config: dict[str, str] = field(default_factory=dict[str, str])
    scalars: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    summary: dict[str, float] = field(default_factory=dict[str, float])
    points: int = 0

    def add(self, name: str, step: int, value: float) -> None:
        self.points += 1
        if name.startswith("summary/"):
            self.summary[name] = value
        else:
            self.scalars.setdefault(name, {})[step] = value


def from_tensorboard(out: Path, name: str) -> list[Found]:
    reader = import_module("tensorboard.backend.event_processing.event_accumulator")
    hparams = import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    events = reader.EventAccumulator(str(out / name), size_guidance={"scalars": 0})
    events.Reload()
    found = Found()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            found.add(tag, event.step, event.value)
    data = hparams.HParamsPluginData.FromString(
        events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    )
    for key, value in data.session_start_info.hparams.items():
        plain = getattr(value, value.WhichOneof("kind"))
        found.config[key] = str(plain)
    return [found]


def from_mlflow(out: Path, name: str) -> list[Found]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fedglad")
    assert experiment is not None
    told: list[Found] = []
    for run in client.search_runs([experiment.experiment_id]):
        if run.info.run_name == name:
            found = Found(dict(run.data.params))
            for key in run.data.metrics:
                for metric in client.get_metric_history(run.info.run_id, key):
                    found.add(key, metric.step, metric.value)
            told.append(found)
    return told


def from_wandb(out: Path, name: str) -> list[Found]:
    messages = import_module("wandb.proto.wandb_internal_pb2")
    reader = import_module("wandb.sdk.internal.datastore")
    told: list[Found] = []
    for path in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        found, store, shown = Found(), reader.DataStore(), ""
        store.open_for_scan(str(path))
        while data := store.scan_data():
            record = messages.Record.FromString(data)
            if record.HasField("run"):
                shown = record.run.display_name
            for item in (*record.run.config.update, *record.config.update):
                if item.key != "_wandb":
                    found.config[item.key] = str(json.loads(item.value_json))
            values = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for key, value in values.items():
                if not key.startswith("_"):
                    found.add(key, values["_step"], value)
            for item in record.summary.update:
                key = "/".join(item.nested_key) or item.key
                if key.startswith("summary/"):
                    found.add(key, 0, json.loads(item.value_json))
        store.close()
        if shown == name:
            told.append(found)
    return told


READ: dict[str, Callable[[Path, str], list[Found]]] = {
    "tensorboard": from_tensorboard,
    "mlflow": from_mlflow,
    "wandb": from_wandb,
}


def records(folder: Path) -> list[dict[str, Any]]:
    return Run(folder).rounds()


def expected(folder: Path) -> dict[str, dict[int, float]]:
    """From the file itself; the alarm and the usual GSI by the rule's formula."""
    told: dict[str, dict[int, float]] = {}
    history: list[float] = []
    for found in records(folder):
        step, groups = found["round"] + 1, found["groups"]
        factors = [group["scale"] for group in groups.values()]
        row: dict[str, float | None] = {
            "test/accuracy": found["test_accuracy"],
            "test/loss": found["test_loss"],
            "averaged/accuracy": found.get("averaged_accuracy"),
            "averaged/loss": found.get("averaged_loss"),
            "train/loss": found["train_loss"],
            "gsi/all": found["gsi_all"],
            "gsi/unfiltered": found["gsi_unfiltered"],
            "factor/mean": sum(factors) / len(factors),
            "factor/least": sorted(factors)[0],
            "factor/most": sorted(factors)[-1],
            "cohort/size": 3,
            "cohort/rejected": 0,
            "round/skipped": 0,
            "label_similarity": found["label_similarity"],
            **{f"gsi/{name}": group["gsi"] for name, group in groups.items()},
            **{f"factor/{name}": group["scale"] for name, group in groups.items()},
            **{f"seconds/{name}": value for name, value in found["seconds"].items()},
            **{f"bytes/{way}": found["bytes"][way] for way in ("down", "up")},
        }
        usual = None
        if len(history) >= Alarm().warmup:  # Σ β^i GSI over the past, the last first, by Σ β^i
            weights = [Alarm().beta ** i for i in range(len(history))]
            pairs = zip(weights, reversed(history), strict=True)
            usual = sum(w * gsi for w, gsi in pairs) / sum(weights)
        row["gsi/usual"] = usual
        history.append(found["gsi_all"])
        for flag in ("one-sided", "outlier"):
            row[f"alarm/{flag}"] = float(found["alarm"] == flag)
        for name, value in row.items():
            if value is not None:
                told.setdefault(name, {})[step] = value
    return told


def flat(config: dict[str, Any], before: str = "") -> dict[str, Any]:
    told: dict[str, Any] = {}
    for key, value in config.items():
        more = flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
        told |= more
    return told


@every_tracker
@pytest.mark.slow
def test_a_run_is_read_back_as_it_is(to: str, digits: Path, tmp_path: Path):
    import tomllib

    tracking = track(digits, to=to, out=tmp_path)
    assert (tracking.rounds, tracking.finished) == (6, True)
    (found,) = READ[to](tmp_path, "digits-six")
    wanted = expected(digits)
    assert set(found.scalars) == set(wanted)
    for name, steps in wanted.items():
        # TensorBoard keeps float32
        assert found.scalars[name] == pytest.approx(steps, rel=1e-6), name
    assert sorted(found.scalars["test/accuracy"]) == [2, 4, 6]
    assert sorted(found.scalars["gsi/usual"]) == list(range(Alarm().warmup + 1, 7))
    summary = json.loads((digits / "summary.json").read_text())
    numbers = ["last10_accuracy", "final_accuracy", "rounds", "skipped", "seconds"]
    numbers += ["last10_averaged_accuracy", "final_averaged_accuracy"]
    assert found.summary == pytest.approx({f"summary/{k}": summary[k] for k in numbers}, rel=1e-6)
    config = flat(tomllib.loads((digits / "config.toml").read_text()))
    assert set(found.config) == set(config)
    for key, value in config.items():
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        told = float(found.config[key]) if numeric else found.config[key]
        assert told == (value if numeric else str(value)), key


@every_tracker
@pytest.mark.slow
def test_twice_is_once(to: str, digits: Path, tmp_path: Path):
    track(digits, to=to, out=tmp_path)
    (first,) = READ[to](tmp_path, "digits-six")
    track(digits, to=to, out=tmp_path)
    (again,) = READ[to](tmp_path, "digits-six")
    assert again == first


@every_tracker
@pytest.mark.slow
def test_an_unfinished_run_is_continued(to: str, digits: Path, tmp_path: Path):
    part = shortened(digits, tmp_path / "digits-six", 4)
    tracking = track(part, to=to, out=tmp_path / "out")
    assert (tracking.rounds, tracking.finished) == (4, False)
    (found,) = READ[to](tmp_path / "out", "digits-six")
    assert (sorted(found.scalars["gsi/all"]), found.summary) == ([1, 2, 3, 4], {})
    track(digits, to=to, out=tmp_path / "out")  # the same run in another place
    (found,) = READ[to](tmp_path / "out", "digits-six")
    track(digits, to=to, out=tmp_path / "whole")
    assert [found] == READ[to](tmp_path / "whole", "digits-six")


@every_tracker
@pytest.mark.slow
def test_two_runs_of_one_name_stay_apart(to: str, digits: Path, tmp_path: Path):
    other = shortened(digits, tmp_path / "digits-six", 6)
    shutil.copy(digits / "summary.json", other)
    lines = records(other)
    lines[0]["train_loss"] = 77.0
    (other / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "out").mkdir()
    track(digits, to=to, out=tmp_path / "out")
    second = track(other, to=to, out=tmp_path / "out")
    if to == "tensorboard":
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert names == ["digits-six", f"digits-six-{second.source.id}"]
        found = [READ[to](tmp_path / "out", name)[0] for name in names]
    else:
        found = READ[to](tmp_path / "out", "digits-six")
    assert 77.0 in sorted(one.scalars["train/loss"][1] for one in found)
    assert [one.points for one in found] == [found[0].points] * 2


def shortened(run: Path, to: Path, rounds: int) -> Path:
    """A copy after so many rounds, unfinished."""
    to.mkdir()
    shutil.copy(run / "config.toml", to)
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    (to / "rounds.jsonl").write_text("".join(lines[:rounds]))
    return to


@every_tracker
@pytest.mark.slow
def test_a_growing_run_is_followed_to_its_end(to: str, digits: Path, tmp_path: Path):
    lines = (digits / "rounds.jsonl").read_text().splitlines(keepends=True)
    part = shortened(digits, tmp_path / "digits-six", 0)
    tracking = Tracking(part, to=to, out=tmp_path / "out")
    seen: list[int] = []
    steps = iter([lines[:1], [lines[1][:50]], [lines[1][50:], lines[2]], [], lines[3:], None])

    def meanwhile() -> None:
        """What the run does between two looks."""
        seen.append(tracking.rounds)
        more = next(steps)
        if more is None:
            shutil.copy(digits / "summary.json", part)
        else:
            with open(part / "rounds.jsonl", "a") as file:
                file.write("".join(more))

    follow([tracking], wait=meanwhile)
    assert seen == [0, 1, 1, 3, 3, 6]
    (found,) = READ[to](tmp_path / "out", "digits-six")
    track(digits, to=to, out=tmp_path / "whole")
    assert [found] == READ[to](tmp_path / "whole", "digits-six")


def test_rounds_that_a_resumed_run_writes_again_are_told_once(digits: Path, tmp_path: Path):
    part = shortened(digits, tmp_path / "digits-six", 4)
    source = trackers.NewRounds(part)
    assert [row.step for row in source.new()] == [1, 2, 3, 4]
    lines = records(digits)
    for line in lines:
        line["seconds"] = {"train": 9.0}  # it takes another time
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (part / "new").write_text(text[: text.index("\n") + 1])
    (part / "new").replace(part / "rounds.jsonl")  # back to round 1, as from a checkpoint
    assert source.new() == []
    (part / "rounds.jsonl").write_text(text)
    assert [row.step for row in source.new()] == [5, 6]


def test_a_folder_that_comes_to_hold_another_run_is_not_mixed_in(digits: Path, tmp_path: Path):
    part = shortened(digits, tmp_path / "run", 2)
    source = trackers.NewRounds(part)
    source.new()
    config = (part / "config.toml").read_text()
    (part / "config.toml").write_text(config.replace("seed = 1", "seed = 2", 1))
    with pytest.raises(TrackError, match="now holds another run: track it with a new command"):
        source.new()


def test_copies_of_one_run_are_refused(digits: Path, tmp_path: Path):
    copy = shortened(digits, tmp_path / "copy", 3)
    code, said = call(digits, copy, "--to", "tensorboard", "--out", tmp_path / "out")
    assert (code, said) == (2, f"error: {digits} and {copy} hold the same run: give one\n")


def test_a_finished_run_that_lost_its_summary_ends(digits: Path, tmp_path: Path):
    part = shortened(digits, tmp_path / "digits-six", 6)
    waits: list[int] = []
    follow([Tracking(part, to="tensorboard", out=tmp_path)], wait=lambda: waits.append(1))
    assert len(waits) == 1


@pytest.mark.slow
@every_tracker
def test_the_command_follows_a_real_run_until_it_ends_or_ctrl_c(to: str, tmp_path: Path):
    sets = [part for key, value in DIGITS.items() for part in ("--set", f"{key}={value}")]
    run = [sys.executable, "-m", "fedglad", "run", "digits", *sets, "--out", "run"]
    subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    waiting = shortened(tmp_path / "run", tmp_path / "waiting", 2)
    config = (waiting / "config.toml").read_text()
    (waiting / "config.toml").write_text(config.replace("seed = 1", "seed = 2", 1))
    command = [sys.executable, "-c", "from fedglad.cli.track import app; app()"]
    arguments = ["run", "waiting", "--to", to, "--out", "out", "--follow"]
    with subprocess.Popen(
        [*command, *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=made.hear_ctrl_c,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Following the runs")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "run: 6 rounds, finished" in out
    assert "waiting: 2 rounds, not finished" in out
    assert waiting.is_dir()
    (found,) = READ[to](tmp_path / "out", "waiting")
    assert sorted(found.scalars["gsi/all"]) == [1, 2]


# ------------------------------------------------------------------------------ network, refusals

GUARD = """
import ipaddress, sys
def guard(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        place = args[0] if event == "socket.getaddrinfo" else args[1]
        host = place[0] if isinstance(place, tuple) else place
        local = not isinstance(place, tuple) and event != "socket.getaddrinfo"  # a file
        if not local and host not in (None, "localhost", "127.0.0.1", "::1"):
            sys.stderr.write(f"NETWORK {event} {place}\\n")
            raise OSError(f"network: {event} {place}")
sys.addaudithook(guard)
from fedglad.cli.track import app
app()
"""


@pytest.mark.slow
@every_tracker
def test_nothing_goes_over_the_network(to: str, digits: Path, tmp_path: Path):
    command = [sys.executable, "-c", GUARD, str(digits), "--to", to, "--out", str(tmp_path / "out")]
    trace = tmp_path / "trace"
    strace = shutil.which("strace")  # sees W&B's helper too, which is no Python
    watched = [strace, "-f", "-qq", "-e", "trace=connect,sendto,sendmsg", "-o", str(trace)]
    home = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        [*(map(str, watched) if strace else []), *command],
        capture_output=True,
        text=True,
        timeout=300,
        env=home,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2
    if strace:
        lines = trace.read_text().splitlines()
        abroad = [line for line in lines if re.search(r"AF_INET", line) and not local(line)]
        assert abroad == []


def local(line: str) -> bool:
    return 'inet_addr("127.' in line or '"::1"' in line


def test_the_network_is_seen_where_it_is_used():
    script = GUARD.replace("from fedglad.cli.track import app\napp()", "")
    script += "import socket; socket.create_connection(('192.0.2.1', 9), timeout=0.01)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "NETWORK" in done.stderr


@pytest.mark.slow
@every_tracker
def test_without_its_package_the_way_out_is_told(to: str, digits: Path, tmp_path: Path):
    hidden = f"import sys; sys.modules[{to!r}] = None; from fedglad.cli.track import app; app()"
    command = [sys.executable, "-c", hidden, str(digits), "--to", to, "--out", str(tmp_path / "o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    shown = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "W&B"}[to]
    wanted = f"tracking to {shown} needs the package {to}: pip install 'fedglad[{to}]'"
    assert (done.returncode, done.stderr) == (2, f"error: {wanted}\n")
    assert not (tmp_path / "o").exists()


def call(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def test_mistakes_are_told(digits: Path, tmp_path: Path):
    assert call(tmp_path / "none", "--to", "tensorboard") == (
        2,
        f"error: there is no folder {tmp_path / 'none'}\n",
    )
    assert "unknown tracker 'tensorbord': choose from" in call(digits, "--to", "tensorbord")[1]
    (tmp_path / "file").write_text("")
    code, said = call(digits, "--to", "tensorboard", "--out", tmp_path / "file" / "x")
    assert code == 2
    assert "choose another --out" in said


@pytest.mark.slow
def test_a_file_that_is_no_database_is_told(digits: Path, tmp_path: Path):
    (tmp_path / "mlflow.db").write_text("my notes, which are not a database\n" * 100)
    code, said = call(digits, "--to", "mlflow", "--out", tmp_path)
    assert code == 2
    assert said.startswith(f"error: {tmp_path} cannot be written for MLflow: ")
    assert said.endswith("; choose another --out\n")
    assert (tmp_path / "mlflow.db").read_text().startswith("my notes")


def test_the_command_tells_what_it_wrote_and_how_to_see_it(digits: Path, tmp_path: Path):
    out = tmp_path / "a b"
    assert call(digits, digits, "--to", "tensorboard", "--out", out) == (
        0,
        f"digits-six: 6 rounds, finished\nSee it: tensorboard --logdir '{out}'\n",
    )


# ------------------------------------------------------------------------------------------ names


def test_every_name_is_in_the_documentation():
    text = (ROOT / "docs" / "trackers.md").read_text("utf-8")
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", text, re.M)
    assert [row for row in rows if row[0] in NAMES] == list(NAMES.items())


def test_every_scalar_has_a_name_in_the_table(digits: Path):
    (row, *_) = trackers.NewRounds(digits).new()
    patterns = [re.sub(r"<\w+>", ".+", re.escape(name)) for name in NAMES]
    assert all(any(re.fullmatch(p, name) for p in patterns) for name in row.scalars)


def test_an_average_is_told_under_names_of_its_own(tmp_path: Path):
    settings = {"rounds": 2, "client.epochs": 1, "average.name": "ema"}
    execute(*load("digits", settings), out=tmp_path / "run")
    for row, done in zip(
        trackers.NewRounds(tmp_path / "run").new(), Run(tmp_path / "run").rounds(), strict=True
    ):
        assert row.scalars["averaged/accuracy"] == done["averaged_accuracy"]
        assert row.scalars["averaged/loss"] == done["averaged_loss"]
        assert row.scalars["test/accuracy"] == done["test_accuracy"]


def test_a_skipped_round_and_rejected_updates_are_told():
    record = {
        "round": 3,
        "status": "skipped",
        **dict.fromkeys(("test_accuracy", "test_loss", "train_loss", "gsi_all", "gsi_unfiltered")),
        "label_similarity": None,
        "clients": [{"id": "a", "rejected": "NaN"}, {"id": "b"}],
        "groups": {},
        "seconds": {},
    }
    assert scalars(record, Names(), usual=1.5, flag=None) == {
        "gsi/usual": 1.5,
        "alarm/one-sided": 0.0,
        "alarm/outlier": 0.0,
        "cohort/size": 2.0,
        "cohort/rejected": 1.0,
        "round/skipped": 1.0,
    }


def test_bytes_and_epsilon_are_written_where_they_are_known():
    checked = clean(made.record(0, bytes={"down": 40, "up": 20}, epsilon=1.5))
    assert checked is not None
    found = scalars(checked[0], Names(), usual=None, flag=None)
    assert (found["bytes/down"], found["bytes/up"], found["privacy/epsilon"]) == (40, 20, 1.5)
    old = clean(made.record(0))
    assert old is not None
    assert (
        not {"bytes/down", "privacy/epsilon"}
        & scalars(old[0], Names(), usual=None, flag=None).keys()
    )


def test_the_scores_of_single_clients_are_written():
    own = {"score": "accuracy", "count": 2, "mean": 0.5, "worst_decile": 0.25, "std": None}
    checked = clean(made.record(0, client_scores=own, averaged_client_scores=own))
    assert checked is not None
    found = scalars(checked[0], Names(), usual=None, flag=None)
    named = {name: x for name, x in found.items() if name.startswith("clients/")}
    assert named == {"clients/mean": 0.5, "clients/worst_decile": 0.25}
    assert {"clients/mean", "clients/worst_decile", "clients/std"} <= NAMES.keys()


def test_own_names_are_made_safe():
    names = Names()
    assert names("gsi", "layers.0.weight") == "gsi/layers.0.weight"
    assert names("gsi", "all") == "gsi/all-2"
    assert names("factor", "all") == "factor/all"
    assert names("factor", "Mean") == "factor/Mean-2"
    assert names("gsi", "a b") == "gsi/a_b"
    assert names("gsi", "a/b") == "gsi/a_b-2"
    assert names("gsi", "a b") == "gsi/a_b"
    assert names("gsi", "..") == "gsi/__"
    assert names("gsi", "") == "gsi/_"


@given(st.lists(st.text(max_size=300), unique=True, max_size=30))
def test_every_own_name_is_valid_everywhere_and_different(own: Sequence[str]):
    validate = import_module("mlflow.utils.validation")._validate_metric_name
    names = Names()
    made = [names("gsi", name) for name in own]
    assert len({name.lower() for name in made}) == len(own)
    for name in made:
        validate(name)


def test_settings_are_flat_and_plain():
    config = {"rounds": 3, "server": {"lr": 1.0, "on": True}, "model": {"dropout": [0.25, 0.5]}}
    assert hyperparameters(config) == {
        "rounds": 3,
        "server.lr": 1.0,
        "server.on": True,
        "model.dropout": "[0.25, 0.5]",
    }
    assert hyperparameters({"a": {"b": {"c": 1}}}) == {"a.b": '{"c": 1}'}


def test_a_hostile_config_has_settings_and_an_id(tmp_path: Path):
    folder = made.write(tmp_path / "run", [made.record(0)])
    with open(folder / "config.toml", "a") as file:
        file.write(".".join(["a"] * 3000) + " = 1\n[b]\n" + f"c = 0x{'f' * 5000}\n")
    source = NewRounds(folder)
    assert len(source.id) == 12
    told = hyperparameters(source.view.config)
    assert (told["engine.a"], told["b.c"], told["rounds"]) == ("?", "?", 3)


def test_only_numbers_of_a_summary_are_told():
    summary = {"rounds": 3, "final_accuracy": None, "machine": "x", "seconds": float("inf")}
    summary["huge"] = 10**400
    assert summary_scalars(summary) == {"summary/rounds": 3.0}


def test_damage_is_told(tmp_path: Path):
    folder = made.write(tmp_path / "run", [made.record(t) for t in range(3)], finish=True)
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    (folder / "rounds.jsonl").write_text("\n".join([lines[0], "{", lines[2]]) + "\n")
    code, said = call(folder, "--to", "tensorboard", "--out", tmp_path / "out")
    assert code == 0
    assert "Note: rounds.jsonl is damaged in line 2" in " ".join(said.split())


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path):
    folder = made.write(tmp_path / "run", [made.record(0)])
    (tmp_path / "file").touch()
    code, said = call(folder, "--to", "wandb", "--out", tmp_path / "file" / "out")
    assert code == 2
    assert "cannot be written for W&B" in " ".join(said.split())
