"""A run's folder in any state: what is there is read, what is missing is said."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedglad.config.schema import load
from fedglad.report import page
from fedglad.report.figures import payload
from fedglad.runs import execute
from fedglad.runs.reader import FILES, Run, RunError, run_folders
from tests.report.made import read, record, write

LABELS = [[3, 1], [0, 2]]
THREE = [record(t) for t in range(3)]


def damage(folder: Path, text: str | bytes, name: str = "rounds.jsonl") -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def lines(*found: Any) -> str:
    return "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in found)


def numbers(folder: Path) -> list[int]:
    return [found["round"] for found in read(folder).rounds]


def test_a_whole_run_misses_nothing(tmp_path: Path):
    view = read(write(tmp_path, THREE, labels=LABELS, finish=True))
    assert view.missing == ()
    assert (view.finished, view.complete, view.planned) == (True, True, 3)
    assert view.config["adapter"] == {"name": "glad", "gamma": 0.02}
    assert view.labels is not None
    assert view.labels.tolist() == LABELS
    # The report needs no statistics by tensor.
    kept = [{key: value for key, value in one.items() if key != "tensors"} for one in THREE]
    assert list(view.rounds) == [{**one, "reason": None} for one in kept]


def test_a_folder_that_is_no_run(tmp_path: Path):
    with pytest.raises(RunError, match=r"is not a run: it has no config\.toml, no rounds\.jsonl"):
        read(tmp_path)
    with pytest.raises(RunError, match="there is no folder"):
        read(tmp_path / "absent")
    with pytest.raises(RunError, match=r"holds no run: there is no config\.toml, no rounds\.jsonl"):
        run_folders([tmp_path])
    with pytest.raises(RunError, match="there is no folder"):
        run_folders([tmp_path / "absent"])
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="file is a file: give the folder of a run"):
        run_folders([tmp_path / "file"])


def test_a_run_that_has_not_begun(tmp_path: Path):
    write(tmp_path).joinpath("rounds.jsonl").unlink()
    view = read(tmp_path)
    assert view.rounds == ()
    assert not view.finished
    assert view.missing == (
        "there is no rounds.jsonl: no round is recorded",
        "there is no labels.json: no label distributions can be shown",
        "the run is not finished, rounds recorded: 0 of 3",
    )


def test_only_rounds(tmp_path: Path):
    view = read(write(tmp_path, THREE, config=None, labels=LABELS))
    assert (len(view.rounds), view.planned, view.finished) == (3, None, False)
    assert view.missing == (
        "there is no config.toml: the settings and the seed are not known",
        "the run is not finished, rounds recorded: 3",
    )


def test_only_a_summary(tmp_path: Path):
    write(tmp_path, THREE, finish=True, labels=LABELS)
    (tmp_path / "rounds.jsonl").unlink()
    view = read(tmp_path)
    assert (view.rounds, view.finished, view.complete) == ((), True, False)
    assert view.missing == (
        "there is no rounds.jsonl: no round is recorded",
        "summary.json is of 3 rounds, 0 can be read: it counts",
    )


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path):
    folder = write(tmp_path, labels=LABELS)
    damage(folder, lines(THREE[0], THREE[1], json.dumps(THREE[2])[:50]))
    view = read(folder)
    assert len(view.rounds) == 2
    assert view.missing == (
        "the last line of rounds.jsonl is half written, and left out",
        "the run is not finished, rounds recorded: 2 of 3",
    )


def test_a_whole_line_without_its_end_counts(tmp_path: Path):
    folder = damage(write(tmp_path, labels=LABELS), lines(*THREE).rstrip())
    assert numbers(folder) == [0, 1, 2]
    assert read(folder).missing == ("there is no summary.json: the result is that of the rounds",)


@pytest.mark.parametrize(
    "bad",
    [
        "{\n",
        "\x00" * 20 + "\n",
        "[]\n",
        "3\n",
        '{"status": "stepped"}\n',
        '{"round": "1"}\n',
        '{"round": -1}\n',
        '{"round": true}\n',
        '{"round": 1e3}\n',
        f'{{"round": {10**12}}}\n',
        f'{{"round": {"9" * 5000}}}\n',
        "[" * 100_000 + "\n",
        b"\xff\xfe{\n",
    ],
    ids=lambda bad: repr(bad)[:20],
)
def test_a_damaged_line_in_the_middle_costs_that_line(tmp_path: Path, bad: str | bytes):
    raw = bad if isinstance(bad, bytes) else bad.encode()
    text = lines(THREE[0]).encode() + raw + lines(THREE[1], THREE[2]).encode()
    folder = damage(write(tmp_path, THREE, labels=LABELS, finish=True), text)
    view = read(folder)
    assert [found["round"] for found in view.rounds] == [0, 1, 2]
    assert view.missing == ("rounds.jsonl is damaged in line 2: left out",)


def test_many_damaged_lines_are_counted(tmp_path: Path):
    folder = damage(write(tmp_path, labels=LABELS), "x\n" * 11)
    told = "rounds.jsonl is damaged in lines 1, 2, 3, 4, 5, 6, 7, 8 and 3 more: left out"
    assert told in read(folder).missing


def test_gaps_and_doubles_are_said(tmp_path: Path):
    again = record(1, test_accuracy=0.5)
    known = [record(t) for t in (9, 1, 4, 3)]
    folder = write(tmp_path, [*known, again], labels=LABELS)
    view = read(folder)
    assert [found["round"] for found in view.rounds] == [1, 3, 4, 9]
    assert view.rounds[0]["test_accuracy"] == 0.5  # the last that was written
    assert view.missing[0] == "round 2 is recorded more than once: the last record counts"
    # rounds 0, 2, 5 to 8 are not there: people count from 1
    assert view.missing[1] == "rounds 1, 3, 6 to 9 not recorded, or damaged"


def test_a_gap_of_any_size_is_no_work(tmp_path: Path):
    view = read(write(tmp_path, [record(0), record(999_999_999)]))
    assert "rounds 2 to 999999999 not recorded, or damaged" in view.missing


@pytest.mark.parametrize(
    ("field", "bad", "instead"),
    [
        ("clients", "everybody", []),
        ("clients", None, []),
        ("clients", {"id": 3}, []),
        ("groups", ["w"], {}),
        ("groups", {"w": 1.0}, {}),
        ("groups", {"w": {"gsi": 1.0}}, {}),
        ("seconds", 3, {}),
        ("seconds", {"train": "long"}, {}),
        ("reason", 3, None),
        ("test_accuracy", "0.8", None),
        ("test_accuracy", 80, None),
        ("gsi_all", 0, None),
        ("gsi_all", True, None),
        ("train_loss", float("nan"), None),
        ("train_loss", float("inf"), None),
        ("train_loss", 10**400, None),
        ("label_similarity", [0.5], None),
        ("status", 7, "unknown"),
    ],
)
def test_a_wrong_type_costs_that_field(tmp_path: Path, field: str, bad: Any, instead: Any):
    found = [record(0), record(1, **{field: bad}), record(2)]
    view = read(write(tmp_path, found, labels=LABELS))
    assert view.rounds[1][field] == instead
    assert view.rounds[1]["round"] == 1
    assert view.rounds[0][field] == record(0).get(field)
    assert view.missing[0] == f"'{field}' is damaged in round 2: what can be read is shown"


@pytest.mark.parametrize(
    ("field", "of", "bad"),
    [
        ("clients", "weight", "much"),
        ("clients", "loss", [1.0]),
        ("clients", "sq_norm", -1),
        ("clients", "rejected", {}),
        ("groups", "gsi", "x"),
        ("groups", "baseline", 0),
    ],
)
def test_a_wrong_type_inside_a_field_is_said(tmp_path: Path, field: str, of: str, bad: Any):
    found = [record(0), record(1)]
    (found[1]["groups"]["w"] if field == "groups" else found[1]["clients"][1])[of] = bad
    view = read(write(tmp_path, found, labels=LABELS))
    assert view.missing[0] == f"'{field}' is damaged in round 2: what can be read is shown"


def test_a_wrong_alarm_is_as_if_not_recorded(tmp_path: Path):
    view = read(write(tmp_path, [record(0, alarm="maybe"), record(1, alarm="outlier")]))
    assert "alarm" not in view.rounds[0]
    assert view.rounds[1]["alarm"] == "outlier"


def test_a_number_that_no_browser_can_hold_is_a_name(tmp_path: Path):
    # Flower's node ids have 64 bits; JavaScript's numbers are exact below 2⁵³.
    ids = [2**53 - 1, 2**53, 2**64 - 1, 2**128]
    clients = [{"id": k, "weight": 0.25, "loss": 1.0, "sq_norm": 1.0} for k in ids]
    view = read(write(tmp_path, [record(0, clients=clients)], labels=LABELS))
    shown = [client["id"] for client in view.rounds[0]["clients"]]
    assert shown == [9007199254740991, "9007199254740992", "18446744073709551615", None]
    assert view.missing[0] == "'clients' is damaged in round 1: what can be read is shown"


def test_what_can_be_read_of_clients_and_groups_stays(tmp_path: Path):
    clients = [
        3,
        {"id": ["x"], "weight": "much", "loss": None, "sq_norm": -1},
        {"id": "a\ud800\x1b[31m", "weight": 0.5, "loss": 2, "sq_norm": 4, "rejected": {}},
        {"id": "y" * 300, "rejected": "z" * 300},
    ]
    groups = {"a": {"gsi": "x", "baseline": None, "scale": 0.5}, "b": {"scale": "1"}}
    (found,) = read(write(tmp_path, [record(0, clients=clients, groups=groups)])).rounds
    unknown, hostile, long = found["clients"]
    assert unknown == {"id": None, "weight": None, "loss": None, "sq_norm": None}
    assert hostile == {
        "id": "a?�[31m",
        "weight": 0.5,
        "loss": 2.0,
        "sq_norm": 4.0,
        "rejected": "the reason is damaged",
    }
    assert (len(long["id"]), len(long["rejected"])) == (100, 200)
    assert found["groups"] == {"a": {"gsi": None, "baseline": None, "scale": 0.5}}


@pytest.mark.parametrize("bad", ["rounds = ", "\x00", b"\xff", "a = " + "[" * 100_000, "x = 1 y"])
def test_a_damaged_config(tmp_path: Path, bad: str | bytes):
    folder = damage(write(tmp_path, THREE, labels=LABELS, finish=True), bad, "config.toml")
    view = read(folder)
    assert (view.config, len(view.rounds), view.planned) == ({}, 3, 3)  # from the summary
    (told,) = view.missing
    assert told.startswith("config.toml is damaged, its settings are not known: ")


@pytest.mark.parametrize("bad", ["", "{", "[]", "null", b"\xff"])
def test_a_damaged_summary(tmp_path: Path, bad: str | bytes):
    folder = damage(write(tmp_path, THREE, labels=LABELS), bad, "summary.json")
    view = read(folder)
    assert (view.summary, view.finished) == (None, True)
    assert view.missing == ("summary.json is damaged: the result is worked out from the rounds",)


@pytest.mark.parametrize(
    "bad",
    ["3", "[]", "[[1], [1, 2]]", '[["x"]]', "[[-1]]", "[[NaN]]", "[[1e300]]", "[[null]]"],
)
def test_damaged_labels(tmp_path: Path, bad: str):
    text = f'{{"counts": {bad}}}'
    folder = damage(write(tmp_path, THREE, finish=True), text, "labels.json")
    view = read(folder)
    assert view.labels is None
    assert view.missing == ("labels.json is damaged: no label distributions can be shown",)


def test_folders_and_pipes_in_place_of_files(tmp_path: Path):
    for name in ("config.toml", "summary.json"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "rounds.jsonl")  # reading it would wait for ever
    view = read(tmp_path)
    (tmp_path / "rounds.jsonl").unlink()  # whoever looks through old test folders would wait too
    assert (view.config, view.rounds, view.summary) == ({}, (), None)
    assert view.missing[:3] == (
        "config.toml is not a file: the settings and the seed are not known",
        "summary.json is not a file: the result is worked out from the rounds",
        "rounds.jsonl is not a file: no round is recorded",
    )


# -------------------------------------------------------------------------------- again and again


def test_a_reader_reads_only_what_is_new(tmp_path: Path):
    folder = write(tmp_path, THREE[:1], labels=LABELS)
    reader = Run(folder)
    first = reader.read().rounds
    with open(folder / "rounds.jsonl", "a") as file:
        file.write(lines(THREE[1], json.dumps(THREE[2])[:30]))
        file.flush()
        second = reader.read()
        assert [found["round"] for found in second.rounds] == [0, 1]
        assert second.rounds[0] is first[0]  # not parsed again
        assert "the last line of rounds.jsonl is half written, and left out" in second.missing
        file.write(json.dumps(THREE[2])[30:] + "\n")
        file.flush()
    third = reader.read()
    assert [found["round"] for found in third.rounds] == [0, 1, 2]
    assert third.rounds[1] is second.rounds[1]
    assert third.missing == read(folder).missing


def test_a_reader_sees_that_the_file_is_another_one(tmp_path: Path):
    folder = write(tmp_path, [record(t, train_loss=float(t)) for t in range(3)])
    reader = Run(folder)
    reader.read()
    damage(folder, lines(*(record(t, train_loss=9.0 + t) for t in range(4))))  # longer
    assert [found["train_loss"] for found in reader.read().rounds] == [9, 10, 11, 12]
    damage(folder, lines(record(0, train_loss=5.0)))  # shorter, as after --resume
    assert [found["train_loss"] for found in reader.read().rounds] == [5]
    (folder / "rounds.jsonl").unlink()
    assert reader.read().rounds == ()


def test_the_version_tells_of_every_change(tmp_path: Path):
    folder = write(tmp_path, THREE[:1])
    reader = Run(folder)
    seen = [reader.version()]
    assert reader.version() == seen[0]
    with open(folder / "rounds.jsonl", "a") as file:
        file.write(lines(THREE[1]))
    seen.append(reader.version())
    for name in ("summary.json", "labels.json"):
        damage(folder, "{}", name)
        seen.append(reader.version())
    (folder / "config.toml").unlink()
    seen.append(reader.version())
    assert len(set(seen)) == len(seen)


def test_a_folder_of_runs(tmp_path: Path):
    for k, name in enumerate(("late", "early", "no-config")):
        write(tmp_path / name, THREE, config=None if name == "no-config" else {"rounds": 3})
        for file in FILES:
            if (tmp_path / name / file).exists():
                os.utime(tmp_path / name / file, (100 - 10 * k, 100 - 10 * k))
    (tmp_path / "empty").mkdir()
    order = [tmp_path / name for name in ("no-config", "early", "late")]
    assert run_folders([tmp_path]) == order
    assert run_folders([tmp_path / "late", tmp_path, tmp_path / "late" / "."]) == [
        tmp_path / "late",
        *order[:2],
    ]


# ------------------------------------------------------------------------------------------- fuzz


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the simulator, of milliseconds."""
    tiny = {"rounds": 6, "model.name": "softmax", "model.features": 64, "client.epochs": 1}
    tiny |= {"sampler.clients_per_round": 3, "engine.name": "serial"}
    return execute("digits", load("digits", tiny)[1], out=tmp_path_factory.mktemp("r") / "x").folder


def check(folder: Path) -> None:
    """A report, or RunError; nothing else."""
    try:
        told = payload([read(folder)])
    except RunError:
        return
    assert json.loads(page.data(told)) == told  # JSON without NaN
    (run,) = told["runs"]
    per_round = ("status", "reason", "scores", "test_loss", "train_loss", "gsi", "usual", "alarm")
    assert {len(run[key]) for key in (*per_round, "cohorts", "sizes", "rejections")} == {
        len(run["rounds"])
    }
    assert run["rounds"] == sorted(set(run["rounds"]))


def test_a_real_run_is_whole(real: Path):
    view = read(real)
    assert (len(view.rounds), view.finished, view.planned) == (6, True, 6)
    assert [told for told in view.missing if "labels.json" not in told] == []
    check(real)


damages = st.lists(
    st.tuples(
        st.sampled_from([*FILES, "labels.json"]),
        st.sampled_from(["cut", "flip", "drop", "double", "insert"]),
        st.floats(0, 1),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=6,
)


def cut_and_flipped(real: Path, tmp_path: Path, how: list[Any]) -> None:
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in (*FILES, "labels.json"):
        if (real / name).is_file():
            shutil.copy(real / name, folder)
    for name, kind, start, end, put in how:
        path = folder / name
        data = path.read_bytes() if path.is_file() else b""
        a, b = sorted((int(start * len(data)), int(end * len(data))))
        if kind == "cut":
            data = data[:a]
        elif kind == "flip":
            data = data[:a] + bytes(x ^ put[0] for x in data[a : a + 1]) + data[a + 1 :]
        elif kind == "drop":
            data = data[:a] + data[b:]
        elif kind == "double":
            data = data[:b] + data[a:]
        else:
            data = data[:a] + put + data[a:]
        path.write_bytes(data)
    check(folder)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
places = st.lists(st.integers(0, 50), min_size=1, max_size=4)


def put(tree: Any, where: list[int], value: Any) -> Any:
    """The tree with the value at some place in it."""
    if not where or not isinstance(tree, dict | list) or not tree:
        return value
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = keys[where[0] % len(keys)]
    tree[key] = put(tree[key], where[1:], value)
    return tree


changes = st.lists(st.tuples(st.integers(0, 8), places, json_values), max_size=6)


def of_any_type(real: Path, tmp_path: Path, how: list[Any]) -> None:
    folder = tmp_path / "strange"
    folder.mkdir(exist_ok=True)
    shutil.copy(real / "config.toml", folder)
    records = [json.loads(line) for line in (real / "rounds.jsonl").read_text().splitlines()]
    others = [json.loads((real / "summary.json").read_text()), {"counts": LABELS}]
    documents: list[Any] = [*records, *others]
    for which, where, value in how:
        document = documents[which % len(documents)]
        documents[which % len(documents)] = put(document, where, value)
    *records, summary, labels = documents
    damage(folder, lines(*records))
    damage(folder, json.dumps(summary), "summary.json")
    damage(folder, json.dumps(labels), "labels.json")
    check(folder)


def often(examples: int) -> settings:
    return settings(
        max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


@often(50)
@given(damages)
def test_bytes_cut_and_flipped_never_raise(real: Path, tmp_path: Path, how: list[Any]):
    cut_and_flipped(real, tmp_path, how)


@often(50)
@given(changes)
def test_values_of_any_type_never_raise(real: Path, tmp_path: Path, how: list[Any]):
    of_any_type(real, tmp_path, how)


@pytest.mark.slow
@often(1000)
@given(damages)
def test_a_thousand_cuts(real: Path, tmp_path: Path, how: list[Any]):
    cut_and_flipped(real, tmp_path, how)


@pytest.mark.slow
@often(1000)
@given(changes)
def test_a_thousand_wrong_types(real: Path, tmp_path: Path, how: list[Any]):
    of_any_type(real, tmp_path, how)


# ----------------------------------------------------------------------------------------- strict


def test_lines_end_at_the_first_that_is_not_json(tmp_path: Path):
    run = Run(damage(write(tmp_path), '{"round": 0}\n7\n{"round": 2}\n{"rou\n{"round": 4}\n'))
    found = run.lines()
    assert found.records == [{"round": 0}, 7, {"round": 2}]
    assert (found.damaged, found.cut_off) == (4, False)
    assert run.rounds() == [{"round": 0}]  # 7 is JSON, and no round


def test_a_last_line_without_its_end_is_cut_off(tmp_path: Path):
    found = Run(damage(write(tmp_path), '{"round": 0}\n{"rou')).lines()
    assert (found.records, found.damaged, found.cut_off) == ([{"round": 0}], 2, True)
    found = Run(damage(tmp_path, '{"round": 0}\n{"rou\n')).lines()
    assert (found.damaged, found.cut_off) == (2, False)


def test_no_rounds_yet(tmp_path: Path):
    assert Run(tmp_path).lines().records == Run(tmp_path / "absent").rounds() == []
    (tmp_path / "rounds.jsonl").mkdir()
    assert Run(tmp_path).rounds() == []


def test_a_damaged_configuration_or_summary_is_an_error(tmp_path: Path):
    run = Run(damage(damage(tmp_path, "[adapter", "config.toml"), "[]", "summary.json"))
    with pytest.raises(RunError, match=r"config\.toml cannot be read"):
        _ = run.config
    with pytest.raises(RunError, match=r"summary\.json is damaged: \[\] is no summary"):
        _ = run.summary
    assert (Run(tmp_path / "x").config, Run(tmp_path / "x").summary) == (None, None)


def test_what_the_checkpoints_of_a_run_say(real: Path, tmp_path: Path):
    run = Run(shutil.copytree(real, tmp_path / "run"))
    sizes = run.sizes()
    tensors = run.rounds()[0]["tensors"]
    assert sizes
    assert list(sizes) == list(tensors)
    assert run.clients() == len(json.loads((real / "labels.json").read_text())["counts"])
    *_, newest = sorted((run.folder / "checkpoints").glob("*.safetensors"))
    newest.write_bytes(b"\xff" * 100)  # as if its header were endless
    older = list((run.folder / "checkpoints").glob("*.safetensors"))
    assert run.sizes() == (sizes if len(older) > 1 else None)
    shutil.rmtree(run.folder / "checkpoints")
    assert run.sizes() is None


def test_the_nodes_of_a_federation_are_counted_in_its_newest_checkpoint(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    for t, names in ((1, ["a"]), (2, ["a", "b", "c"])):
        state = {"round": t, "sampler": {"nodes": {"names": names}}}
        (tmp_path / "checkpoints" / f"{t:06d}.json").write_text(json.dumps(state))
    assert Run(tmp_path).clients() == 3
    (tmp_path / "checkpoints" / "000002.json").write_text("{")
    assert Run(tmp_path).clients() == 1


def test_reading_loads_no_torch():
    script = "import sys, fedglad.runs.reader; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "False"


# --------------------------------------------------------------------------- clients' own scores


def test_the_last_scores_of_single_clients(tmp_path: Path):
    run = write(tmp_path / "run", [record(0)])
    assert read(run).client_scores == {}
    first = {"round": 0, "ids": [0, "b", 2], "scores": [0.5, 0.25, None]}
    second = {"round": 3, "ids": [0, "b", 2], "scores": [0.75, 1, None]}
    before = Run(run).version()
    damage(run, lines(first, second), "client_scores.jsonl")
    assert Run(run).version() != before
    assert read(run).client_scores == {0: 0.75, "b": 1}
    missing = read(run).missing
    damage(run, lines(first, second)[:-10], "client_scores.jsonl")  # a live run writes it now
    assert read(run).client_scores == {0: 0.5, "b": 0.25}
    assert read(run).missing == missing


@pytest.mark.parametrize(
    "bad",
    [b"\xff", b"[]", b'{"ids": [1]}', b'{"ids": [1], "scores": []}', b'{"ids": 3, "scores": 4}'],
)
def test_hostile_scores_of_single_clients_are_said(tmp_path: Path, bad: bytes):
    run = write(tmp_path / "run", [record(t) for t in range(3)], finish=True)
    good = {"round": 0, "ids": [7, None, [1], 9], "scores": [0.5, 1, 1, "x"]}
    damage(run, lines(good).encode() + bad, "client_scores.jsonl")
    view = read(run)
    assert view.client_scores == {7: 0.5}
    note = "client_scores.jsonl is damaged at its end: older scores are shown, if any"
    assert view.missing.count(note) == 1
    damage(run, bad + b"\n" + bad, "client_scores.jsonl")
    assert read(run).client_scores == {}
    assert read(run).missing.count(note) == 1
    (run / "summary.json").unlink()  # of a live run the last line alone may be half written
    assert note in read(run).missing
