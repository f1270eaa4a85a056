"""The alarm: its arithmetic by hand, what never happens, and that a run records it."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_support import TINY, Watched, facts, outcome
from runs.test_runs import stopped

import fedglad
from fedglad.cli.progress import ShowRun, distrusted, round_line
from fedglad.config.schema import load
from fedglad.data.digits import Digits
from fedglad.records import Record, Round
from fedglad.runs import Run, execute
from fedglad.trust import Alarm

HALF = Alarm(low=0.8, high=1.5, beta=0.5, warmup=2)


def play(
    alarm: Alarm, gsis: Sequence[float | None]
) -> tuple[list[str | None], list[float | None], dict[str, Any]]:
    """The flags, what each GSI was compared with, and the state at the end."""
    flags: list[str | None] = []
    usual: list[float | None] = []
    state: dict[str, Any] = {}
    for gsi in gsis:
        usual.append(alarm.usual(state))
        flag, state = alarm.judge(gsi, state)
        flags.append(flag)
    return flags, usual, state


# ------------------------------------------------------------------------------------ arithmetic


def test_the_rule_by_hand():
    # β = .5. mean: 0 → .5·2 = 1 → .5·1 + .5·4 = 2.5 → .5·2.5 + .5·2 = 2.25 → .5·2.25 + .5·6
    # = 4.125. Corrected by 1 − .5^n: B = 2.5/.75 = 10/3 after two, 2.25/.875 = 18/7 after three,
    # 4.125/.9375 = 4.4 after four.
    # Round 3: 2 < .8·10/3 = 2.67; round 4: 6 > 1.5·18/7 = 3.86; round 5: .8·4.4 = 3.52 ≤ 4 ≤ 6.6.
    flags, usual, state = play(HALF, [2.0, 4.0, 2.0, 6.0, 4.0])
    assert flags == [None, None, "one-sided", "outlier", None]
    assert usual == [None, None, *map(pytest.approx, (10 / 3, 18 / 7, 4.4))]
    assert state["seen"] == 5


def test_the_thresholds_themselves_are_usual():
    # β = 0: B is the GSI before. Of 2: .5·2 = 1 and 2·2 = 4 are exact in binary.
    alarm = Alarm(low=0.5, high=2.0, beta=0.0, warmup=1)
    for gsi, flag in {1.0: None, 4.0: None, 0.999: "one-sided", 4.001: "outlier"}.items():
        assert play(alarm, [2.0, gsi])[0] == [None, flag]


def test_a_round_without_gsi_is_as_if_it_had_not_been():
    whole = [2.0, 4.0, 2.0, 6.0]
    flags, _, state = play(HALF, [2.0, None, 4.0, None, None, 2.0, 6.0])
    assert flags == [None, None, None, None, None, "one-sided", "outlier"]
    assert state == play(HALF, whole)[2]


def test_the_first_rounds_are_only_listened_to():
    alarm = Alarm(warmup=4)
    flags, usual, _ = play(alarm, [1.0, 1000.0, 1.0, 1000.0, 1.0])
    assert flags[:4] == [None] * 4
    assert usual[:4] == [None] * 4
    assert flags[4] == "one-sided"


def test_one_bad_round_does_not_make_the_next_ones_bad():
    flags, _, _ = play(Alarm(), [2.0] * 12 + [1.0] + [2.0] * 12)
    assert flags == [None] * 12 + ["one-sided"] + [None] * 12


def test_the_defaults_are_those_that_were_measured():
    """Other ones make the tables of docs/trust.md untrue."""
    assert Alarm() == Alarm(low=0.75, high=1.45, beta=0.9, warmup=5)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"low": 1.0}, r"Alarm\(low=1.0, high=.*low must be in \(0, 1\)"),
        ({"low": 0.0}, "low must be in"),
        ({"high": 1.0}, "high above 1"),
        ({"low": math.nan}, "low must be in"),
        ({"beta": 1.0}, r"Alarm\(beta=1.0\): must be in \[0, 1\)"),
        ({"beta": -0.1}, "must be in"),
        ({"warmup": 0}, r"Alarm\(warmup=0\): there must be a round to compare with"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=told):
        Alarm(**given)


def test_the_examples_of_the_page(capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parents[1] / "docs/trust.md").read_text("utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(compile(block, "docs/trust.md", "exec"), {})
    assert capsys.readouterr().out == "one-sided\n['oslo']\n3 3 opposed in 3 of 3 rounds\n"


# ------------------------------------------------------------------------------------ properties

GSI = st.floats(0.5, 1000.0)
ALARMS = st.builds(
    Alarm,
    low=st.floats(0.01, 0.99),
    high=st.floats(1.01, 100.0),
    beta=st.floats(0.0, 0.999),
    warmup=st.integers(1, 10),
)


@given(ALARMS, st.lists(GSI, max_size=30), st.integers(-20, 20))
def test_a_unit_of_gsi_does_not_matter(alarm: Alarm, gsis: list[float], power: int):
    """By powers of two, which change no digit."""
    flags, usual, _ = play(alarm, gsis)
    scaled = play(alarm, [gsi * 2.0**power for gsi in gsis])
    assert scaled[0] == flags
    assert scaled[1] == [None if b is None else b * 2.0**power for b in usual]


@given(ALARMS, st.lists(st.none() | GSI, max_size=30))
def test_nothing_is_flagged_before_the_warmup_is_over(alarm: Alarm, gsis: list[float | None]):
    flags, usual, state = play(alarm, gsis)
    heard = 0
    for gsi, flag, b in zip(gsis, flags, usual, strict=True):
        assert (b is None) == (heard < alarm.warmup)
        if gsi is None or b is None:
            assert flag is None
        heard += gsi is not None
    assert state.get("seen", 0) == heard


@given(ALARMS, GSI, st.integers(1, 40))
def test_equal_rounds_are_never_flagged(alarm: Alarm, gsi: float, rounds: int):
    flags, usual, _ = play(alarm, [gsi] * rounds)
    assert flags == [None] * rounds
    assert all(b == pytest.approx(gsi, rel=1e-9) for b in usual if b is not None)


ODD = st.sampled_from([0.0, 5e-324, 1.0, 1000.0, 1.7e308, math.inf, math.nan])


@given(ALARMS, st.lists(ODD | GSI | st.none(), max_size=30))
def test_no_number_breaks_it(alarm: Alarm, gsis: list[float | None]):
    flags, usual, state = play(alarm, gsis)
    assert set(flags) <= {None, "one-sided", "outlier"}
    assert all(b is None or (b >= 0 and math.isfinite(b)) for b in usual)
    json.dumps(state, allow_nan=False)


@given(ALARMS, st.lists(st.none() | GSI, max_size=20), st.integers(0, 20))
def test_it_goes_on_from_saved_state(alarm: Alarm, gsis: list[float | None], at: int):
    flags, _, end = play(alarm, gsis)
    _, _, state = play(alarm, gsis[:at])
    state = json.loads(json.dumps(state))
    for gsi, flag in zip(gsis[at:], flags[at:], strict=True):
        found, state = alarm.judge(gsi, state)
        assert found == flag
    assert state == end


# ------------------------------------------------------------------------------------------ runs

RUN: dict[str, Any] = {
    **TINY,
    "engine.name": "serial",
    "rounds": 14,
    "checkpoint_every": 4,
    "sampler.name": "scripted",
}


def forced() -> dict[str, Any]:
    """Round 10 by people's count has the clients with the largest shares of one digit."""
    data, digit = Digits().load_federation(), 4
    shares = [float((data.client(k)[1] == digit).double().mean()) for k in range(50)]
    holders = sorted(range(50), key=lambda k: -shares[k])
    return {**RUN, "sampler.cohorts": {"9": holders[:3]}}


def test_every_round_of_a_run_has_its_alarm(tmp_path: Path):
    config = load("digits", forced())[1]
    run = execute("digits", config, out=tmp_path / "run")
    rounds = run.rounds()
    recorded = [found["alarm"] for found in rounds]
    assert recorded == play(Alarm(), [found["gsi_all"] for found in rounds])[0]
    assert recorded[9] == "one-sided"
    assert [found.alarm for found in fedglad.simulate(config)] == recorded


def test_a_skipped_round_has_no_alarm_and_leaves_no_trace():
    """In round 9 all three clients fail."""

    def before(client: int, attempt: int) -> None:
        if client < 3:
            raise OSError("the disk of this client is broken")

    cohorts = {str(t): [3 + t % 5, 8 + t % 3, 11] for t in range(14)}
    given = {**RUN, "sampler.cohorts": {**cohorts, "8": [0, 1, 2]}}
    rounds = list(fedglad.simulate("digits", given, data=Watched(before=before)))
    skipped = [found.t for found in rounds if not found.record.stepped]
    assert skipped == [8]
    gsis = [found.record.gsi_all if found.t != 8 else None for found in rounds]
    assert [found.alarm for found in rounds] == play(Alarm(), gsis)[0]


@pytest.mark.parametrize("after", [2, 8, 9, 11])
def test_a_killed_run_goes_on_with_the_same_alarms(tmp_path: Path, after: int):
    config = load("digits", forced())[1]
    execute("digits", config, out=tmp_path / "whole")
    stopped(tmp_path / "cut", after, config)
    execute("digits", config, out=tmp_path / "cut", resume=True)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_run_from_before_alarms_were_recorded_goes_on(tmp_path: Path):
    """Its lines stay as they are; the rounds to come are judged by all that went before."""
    config = load("digits", forced())[1]
    execute("digits", config, out=tmp_path / "whole")
    stopped(tmp_path / "cut", 8, config)
    path = tmp_path / "cut" / "rounds.jsonl"
    lines = Run(tmp_path / "cut").rounds()  # without checksums, which there were not either
    for line in lines:
        del line["alarm"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "cut" / "labels.json").unlink()
    execute("digits", config, out=tmp_path / "cut", resume=True)
    whole, cut = (list(map(facts, Run(tmp_path / name).rounds())) for name in ("whole", "cut"))
    assert cut[8:] == whole[8:]
    for found in whole[:8]:
        del found["alarm"]
    assert cut[:8] == whole[:8]
    assert (tmp_path / "cut" / "labels.json").is_file()


@pytest.mark.parametrize("older", [True, False])
def test_the_alarms_state_is_in_the_checkpoint_and_was_once_that_of_the_records(
    tmp_path: Path, older: bool
):
    config = load("digits", forced())[1]
    execute("digits", config, out=tmp_path / "whole")
    stopped(tmp_path / "cut", 8, config)
    for path in (tmp_path / "cut" / "checkpoints").glob("*.json"):
        state = json.loads(path.read_text())
        assert state["alarm"]["seen"] == state["round"] == int(path.stem)
        if older:
            state = {key: state[key] for key in ("format", "round", "sampler")}
        path.write_text(json.dumps(state))
    records = tmp_path / "cut" / "rounds.jsonl"
    lines = Run(tmp_path / "cut").rounds()
    if not older:  # then nobody looks at them
        lines = [{**line, "gsi_all": None} for line in lines]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    execute("digits", config, out=tmp_path / "cut", resume=True)
    whole, cut = outcome(tmp_path / "whole"), outcome(tmp_path / "cut")
    assert cut[0][8:] == whole[0][8:]
    assert cut[1:] == whole[1:]


def test_the_labels_of_all_clients_are_in_the_folder(tmp_path: Path):
    run = execute("digits", load("digits", {**RUN, "rounds": 1})[1], out=tmp_path / "run")
    counts = json.loads((run.folder / "labels.json").read_text())["counts"]
    data = Digits().load_federation()
    assert len(counts) == data.clients == 50
    for k, row in enumerate(counts):
        y = data.client(k)[1]
        assert row == [int((y == c).sum()) for c in range(10)]
    assert sum(map(sum, counts)) == 1437


def test_a_large_population_is_not_counted(tmp_path: Path):
    given = {"data.clients": 1001, "rounds": 1, "engine.name": "serial"}
    run = execute("synthetic", load("synthetic", given)[1], out=tmp_path / "run")
    assert not (run.folder / "labels.json").exists()
    (run.folder / "labels.json").write_text("{}")
    run.clear()
    assert not (run.folder / "labels.json").exists()


# -------------------------------------------------------------------------------------- terminal


def test_a_distrusted_round_is_marked():
    record = Record("stepped", gsi_all=1.2)
    plain = Round(4, (1, 2), record, seconds={"train": 0.1})
    marked = Round(4, (1, 2), record, alarm="one-sided", seconds={"train": 0.1})
    assert round_line(plain, 9) == "round 5/9  GSI 1.20  20 clients/s"
    assert round_line(marked, 9) == "round 5/9  [yellow]! one-sided[/]  GSI 1.20  20 clients/s"


def test_a_distrusted_round_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]):
    """Of 100 rounds every tenth is told, and what is distrusted."""
    with ShowRun(100, quiet=False) as show:
        for t in range(20):
            flag = "outlier" if t == 12 else None
            show.round(Round(t, (1,), Record("stepped", gsi_all=2.0), alarm=flag))
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in told] == ["10/100", "13/100", "20/100"]
    assert told[1].startswith("round 13/100  ! outlier  GSI 2.00")


def test_the_distrusted_rounds_in_one_line():
    flags = {11: "one-sided", 40: "outlier", 32: "one-sided"}
    rounds = [{"round": t, "alarm": flags.get(t)} for t in range(50)]
    told = "3 of 50 rounds distrusted: 12, 33 (one-sided), 41 (outlier)"
    assert distrusted(rounds) == told
    assert distrusted(rounds[:5]) == ""
    assert distrusted([{"round": 0}]) == ""  # of an older run
    many = [{"round": t, "alarm": "outlier"} for t in range(22)]
    assert distrusted(many).endswith("19, 20 and 2 more (outlier)")
