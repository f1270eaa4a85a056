"""The numbers of every chart, against records made by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedglad.analysis import clients
from fedglad.report import ReportError, figures, page
from fedglad.report.clients import listed, rows
from fedglad.report.figures import payload
from fedglad.report.headline import span
from tests.report.made import changed, read, record, rounds, write

LABELS = [[3, 1], [0, 4], [2, 0]]

EARLY = "Too early to say whether training is healthy"


def one(folder: Path, records: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
    """The only run's figures."""
    (run,) = payload([read(write(folder, records, **how))])["runs"]
    return run


def tiles(told: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    return {t["label"]: (t["value"], t["detail"], t["tone"]) for t in told["headline"]}


# ----------------------------------------------------------------------------------- round by round


def test_the_columns_of_a_run(tmp_path: Path):
    found = [
        record(0, test_accuracy=0.123456, test_loss=None, gsi_unfiltered=3.0),
        record(1, status="skipped", reason="no update", gsi_all=None, test_accuracy=None),
    ]
    run = one(tmp_path / "name", found)
    assert (run["name"], run["seed"], run["group"]) == ("name", "seed=1", 0)
    assert run["label"] == "data.name=digits adapter.name=glad"
    assert (run["finished"], run["rounds_planned"]) == (False, 3)
    assert run["config"]["adapter.gamma"] == "0.02"
    assert run["config"]["seed"] == "1"
    assert run["rounds"] == [1, 2]  # people count from 1
    assert run["status"] == ["stepped", "skipped"]
    assert run["reason"] == [None, "no update"]
    assert run["scores"] == [12.346, None]  # percent, 5 digits
    assert run["test_loss"] == [None, 0.6]
    assert run["train_loss"] == [0.75, 0.75]
    assert run["gsi"] == [2, None]
    assert run["gsi_unfiltered"] == [3, 2]
    assert run["similarity"] == [0.9, 0.9]
    assert run["seconds"] == 3  # (1 + .5) · 2


def test_gsi_before_the_filter_and_similarity_are_left_out_where_they_say_nothing(tmp_path: Path):
    run = one(tmp_path, [record(t, label_similarity=None) for t in range(3)])
    assert run["gsi_unfiltered"] is None
    assert run["similarity"] is None
    assert run["fit"] is None


def test_a_cohort_has_shares_norms_and_reasons(tmp_path: Path):
    clients = [
        {"id": 7, "weight": 1.0, "loss": None, "sq_norm": 6.25},
        {"id": None, "weight": 0.0, "loss": 0.123456, "sq_norm": None, "rejected": "NaN in 'w'"},
        {"id": "<script>", "weight": 0.0, "loss": 2.0, "sq_norm": 2.0},
    ]
    run = one(tmp_path, [record(0, clients=clients)])
    # norms: sqrt(6.25) = 2.5, sqrt(2) = 1.4142
    assert run["cohorts"] == [
        [
            [7, 1, None, 2.5, None],
            ["#2", 0, 0.12346, None, "NaN in 'w'"],
            ["<script>", 0, 2, 1.4142, None],
        ]
    ]
    assert (run["updates"], run["rejected"], run["left_out"]) == (3, 1, 0)
    assert (run["sizes"], run["rejections"]) == ([3], [1])


def test_a_cohort_that_is_cut_keeps_its_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(figures, "ENTRIES", 8)
    clients: list[dict[str, Any]] = [
        {"id": k, "weight": 0.1, "loss": 1.0, "sq_norm": 1.0} for k in range(10)
    ]
    for k in (2, 3, 5, 6, 7):
        clients[k]["rejected"] = "too long"
    for k in (0, 4):
        clients[k]["rejected"] = "left out by Krum(f=1)"
    run = one(tmp_path, [record(0, clients=clients), record(1)])
    assert run["sizes"] == [10, 2]
    assert run["rejections"] == [5, 0]
    # 8 have room: 6 of the first and both of the second; the rejected, the left out, the others
    assert [[m[0] for m in cohort] for cohort in run["cohorts"]] == [[2, 3, 5, 6, 7, 0], [0, 1]]
    assert run["cohorts"][0][5][4] == "left out by Krum(f=1)"
    assert [row[3] for row in run["clients"][:3]] == [0, 0, 1]  # ids 0, 1, 2


def test_a_page_of_huge_cohorts_is_cut_with_the_rejected_ones_first():
    clients: list[dict[str, Any]] = [
        {"id": k, "weight": 0.1, "loss": 1.0, "sq_norm": 1.0} for k in range(10)
    ]
    clients[8]["rejected"] = "too long"
    notes: list[str] = []
    found = figures.cohorts([record(0, clients=clients), record(1)], notes, entries=8)
    # 12 entries, 8 have room: 6 of the first and the 2 of the second
    assert [[client[0] for client in cohort] for cohort in found] == [[8, 0, 1, 2, 3, 4], [0, 1]]
    assert notes == ["of each cohort at most 6 clients are listed, the rejected ones first"]
    clients[8]["rejected"] = "x" * 120  # takes the room of 1 + 120 / 40 = 4: 3 others, and 1 more
    found = figures.cohorts([record(0, clients=clients)], notes, entries=7)
    assert [client[0] for client in found[0]] == [8, 0, 1, 2]
    notes.clear()
    assert len(figures.cohorts([record(0, clients=clients)], notes, entries=13)[0]) == 10
    assert notes == []


def test_recorded_alarms_are_shown_as_they_are(tmp_path: Path):
    found = [record(t, alarm="outlier" if t == 1 else None) for t in range(3)]
    run = one(tmp_path, found)
    assert run["alarm"] == [None, "outlier", None]
    assert not any("worked out from its GSI" in note for note in run["missing"])


def test_alarms_that_were_not_recorded_are_worked_out():
    # A mean of 2, 2, ... is 2, however it is weighted; a fifth of it is low, 20 times it high. A
    # round that was skipped is not judged, and not in the mean.
    gsi = [2.0] * 30 + [0.4, None, 40.0]
    found = [record(t, gsi_all=g, status="stepped" if g else "skipped") for t, g in enumerate(gsi)]
    for one_round in found:
        del one_round["alarm"]
    usual, alarm, count = figures.alarms(found)
    assert alarm == [None] * 30 + ["one-sided", None, "outlier"]
    assert (usual[0], usual[30]) == (None, pytest.approx(2))
    assert usual[31] == usual[32] != usual[30]
    assert count == 33


def test_which_alarms_were_worked_out_is_said(tmp_path: Path):
    old = [{k: v for k, v in record(t).items() if k != "alarm"} for t in range(3)]
    all_, some = (
        "Alarms were not recorded by this run: they are worked out from its GSI.",
        "Alarms were not recorded by 2 rounds: they are worked out from its GSI.",
    )
    assert all_ in one(tmp_path / "a", old)["missing"]
    assert some in one(tmp_path / "b", [*old[:2], record(2)])["missing"]


# ------------------------------------------------------------------------------------------ factors


def groups(**scales: float) -> dict[str, Any]:
    return {name: {"gsi": 3.0, "baseline": 2.0, "scale": s} for name, s in scales.items()}


def test_factors_and_heat(tmp_path: Path):
    found = [
        record(0, groups=groups(z=0.5, a=1.0, m=1.2)),
        record(1, groups={}, status="skipped"),
        record(2, groups={"a": {"gsi": 1.0, "baseline": None, "scale": 0.123456}}),
    ]
    run = one(tmp_path, found)
    # (.5 + 1 + 1.2) / 3 = .9
    assert run["factor"] == {
        "least": [0.5, None, 0.12346],
        "mean": [0.9, None, 0.12346],
        "most": [1.2, None, 0.12346],
    }
    assert run["heat"] == {
        "groups": ["z", "a", "m"],  # the model's order, as recorded
        "scale": [[0.5, None, None], [1, None, 0.1235], [1.2, None, None]],
        "ratio": [[1.5, None, None], [1.5, None, None], [1.5, None, None]],
    }


def test_without_an_adapter_there_is_no_heat(tmp_path: Path):
    plain = {"w": {"gsi": 2.0, "baseline": None, "scale": 1.0}}
    assert one(tmp_path / "a", [record(0, groups=plain)])["heat"] is None
    assert one(tmp_path / "b", [record(0, groups={})])["heat"] is None
    plain["w"]["scale"] = 0.5  # a fixed factor
    assert one(tmp_path / "c", [record(0, groups=plain)])["heat"] is not None


def test_too_many_groups_are_those_that_moved_the_most():
    # ranges: a 0, b .5, c .2, d .5; room for 2, as a name takes the room of 20 cells
    found = [
        record(0, groups=groups(a=1.0, b=1.0, c=1.0, d=1.0)),
        record(1, groups=groups(a=1.0, b=0.5, c=1.2, d=1.5)),
        record(2, groups=groups(a=1.0, b=0.7, c=1.1, d=1.0)),
    ]
    notes: list[str] = []
    heat = figures.heat(found, notes, cells=59)
    assert heat
    assert heat["groups"] == ["b", "d"]
    assert heat["scale"] == [[1, 0.5, 0.7], [1, 1.5, 1]]
    assert notes == ["the heat map has 2 of 4 groups, those whose factor moved the most"]


def test_the_groups_are_chosen_before_the_map_is_made():
    import tracemalloc

    found = [record(t, groups={}) for t in range(2000)]
    found[0]["groups"] = groups(**{f"g{k}": 1.0 for k in range(5000)})
    found[1]["groups"] = groups(g7=0.5)
    tracemalloc.start()
    try:
        heat = figures.heat(found, [], cells=4000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert heat
    assert heat["groups"] == ["g0", "g7"]
    assert peak < 10e6  # 5,000 × 2,000 numbers are 80 MB


# ------------------------------------------------------------------------------------------- labels


def test_the_regression_of_gsi_on_similarity(tmp_path: Path):
    # x .2 .4 .6, y 1 3 2: means .4 and 2; Sxy = .2 + 0 + 0, Sxx = .08, Syy = 2:
    # slope .2/.08 = 2.5, intercept 2 − 2.5 · .4 = 1, r = .2 / sqrt(.16) = .5
    x, y = [0.2, 0.4, 0.6], [1.0, 3.0, 2.0]
    found = [record(t, label_similarity=x[t], gsi_all=y[t]) for t in range(3)]
    left_out = [record(3, status="skipped", gsi_all=None), record(4, label_similarity=None)]
    run = one(tmp_path, [*found, *left_out])
    assert run["fit"] == {"n": 3, "r": 0.5, "slope": 2.5, "intercept": 1}


@pytest.mark.parametrize(
    "pairs",
    [[(0.2, 1.0), (0.4, 2.0)], [(0.3, 1.0), (0.1 + 0.2, 2.0), (0.3, 3.0)], [(0.1, 2.0)] * 3],
)
def test_too_few_or_constant_points_have_no_line(pairs: list[tuple[float, float]]):
    found = [record(t, label_similarity=x, gsi_all=y) for t, (x, y) in enumerate(pairs)]
    assert figures.fit(found) is None


def test_the_classes_of_a_cohort_and_of_everybody(tmp_path: Path):
    clients = [{"id": k, "weight": 0.5, "loss": 1.0, "sq_norm": 1.0} for k in (0, 2)]
    rejected = [{**clients[0], "rejected": "NaN"}]
    strangers = [{**clients[0], "id": k} for k in (3, "0")]
    found = [
        record(0, clients=clients),
        record(1, clients=rejected),
        record(2, clients=strangers[:1]),
        record(3, clients=strangers[1:]),
        record(4, clients=[]),
    ]
    labels = one(tmp_path, found, labels=LABELS)["labels"]
    # everybody 5 and 5 of 10; clients 0 and 2: 5 and 1 of 6; client 0, though rejected: 3 and 1
    assert labels["population"] == [0.5, 0.5]
    assert labels["cohorts"] == [[0.83333, 0.16667], [0.75, 0.25], None, None, None]
    assert one(tmp_path / "none", found)["labels"] is None
    assert labels["most"] == 0.83333
    assert figures.labels([record(0)], np.zeros((3, 2)), [], [None]) is None


def test_the_classes_of_too_many_rounds_are_those_of_distrusted_and_last_ones():
    found, notes = [record(t) for t in range(6)], list[str]()
    alarm = [None, "outlier", None, None, None, None]
    # room for 8 // 2 classes = 4 rounds: the second, and the last three
    told = figures.labels(found, np.array([[4, 0], [4, 8]]), notes, alarm, cells=8)
    assert told == {
        "population": [0.5, 0.5],
        "cohorts": [None, [0.5, 0.5], None, [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]],
        "most": 0.5,
    }
    assert notes == [
        "the classes of 4 of 6 cohorts are shown: of the distrusted rounds first, then of the "
        "last ones"
    ]


# ------------------------------------------------------------------------------------------ clients


def test_clients_by_how_often_they_were_sampled(tmp_path: Path):
    def member(name: int | str | None, sq_norm: float | None, **more: str) -> dict[str, Any]:
        return {"id": name, "weight": 0.5, "loss": 1.0, "sq_norm": sq_norm, **more}

    found = [
        record(0, clients=[member(5, 4.0), member(2, 16.0)]),
        record(1, clients=[member(5, 1.0, rejected="first"), member("b", 1.0), member(None, 1.0)]),
        record(2, clients=[member(5, None, rejected="second")]),
    ]
    run = one(tmp_path, found)
    # 5: norms 2 and 1, mean 1.5
    assert run["clients"] == [
        [5, 3, 1.5, 2, "second"],
        [2, 1, 4, 0, None],
        ["b", 1, 1, 0, None],
    ]
    assert run["clients_left_out"] == 0


def test_at_most_5000_clients_are_listed():
    cohort: list[dict[str, Any]] = [
        {"id": k, "weight": 0.0, "loss": None, "sq_norm": 1.0} for k in range(5003)
    ]
    cohort[5002]["rejected"] = "x" * 80  # the worst, with the room of 1 + 80 / 40 = 3
    kept = listed(clients([record(0, clients=cohort)]), figures.CLIENTS)
    assert [row[0] for row in rows(kept)] == [*range(4997), 5002]


def test_the_columns_of_the_table_of_clients(tmp_path: Path):
    def member(name: int, trust: float, *flags: str, **more: Any) -> dict[str, Any]:
        one = {"id": name, "weight": 0.5, "loss": 1.0, "sq_norm": 4.0, "trust": trust, **more}
        return {**one, "flags": list(flags)} if flags else one

    found = [
        record(0, clients=[member(1, 1.0, clipped=0.5), member(2, 0.25, "opposed", "copied")]),
        record(1, clients=[member(2, 0.5, "opposed"), member(3, 0.75, "drifting")]),
        record(2, clients=[member(1, 0.8), {"id": 4, "weight": 0, "loss": None, "sq_norm": None}]),
    ]
    run = one(tmp_path, found)
    assert [row[0] for row in run["clients"]] == [1, 2, 3, 4]  # the most sampled first
    assert run["client_columns"] == {
        "worst": [1, 2, 0, 3],  # 2 is to look at, 3 was flagged once, of 4 nothing is known
        "share": [0.5, 0.5, 0.5, 0],
        "loss": [1, 1, 1, None],
        "own": None,
        "ratio": [1, 1, 1, None],
        "left_out": None,
        "clipped": [1, 0, 0, 0],
        "trust": [0.8, 0.5, 0.75, None],
        "mean_trust": [0.9, 0.375, 0.75, None],
        "scores": ["zs", "9i", "q", ""],  # 35 · (1, .8, .25, .5, .75) = 35, 28, 8.75, 17.5, 26.25
        "judged": [2, 2, 1, 0],
        "flagged": [0, 2, 1, 0],
        "flags": [0, [0, 2, 0, 1], [1, 0, 0, 0], 0],  # drifting, opposed, boosted, copied
        "look": [0, 1, 0, 0],
    }
    assert (run["flagged"], run["to_look_at"]) == ([1, 2, 0], [2])
    # trust, and flags as 1, 2, 4, 8 of those that have some
    assert run["cohorts"][0] == [[1, 0.5, 1, 2, None, 1], [2, 0.5, 1, 2, None, 0.25, 10]]
    assert run["cohorts"][2][1] == [4, 0, None, None, None]
    told = tiles(payload([read(tmp_path)]))
    assert told["Clients to look at"] == ("1 of 4", "flagged often: 2", "bad")


def test_without_trust_there_are_no_columns_of_it(tmp_path: Path):
    columns = one(tmp_path, [record(0), record(1)])["client_columns"]
    known = {"worst": [0, 1], "share": [0.25, 0.75], "loss": [1.5, 0.5], "ratio": [0.8, 1.2]}
    assert {key: value for key, value in columns.items() if value is not None} == known
    assert "Clients to look at" not in tiles(payload([read(tmp_path)]))


def test_a_flagged_client_stays_in_a_cohort_that_is_cut():
    clients: list[dict[str, Any]] = [
        {"id": k, "weight": 0.1, "loss": 1.0, "sq_norm": 1.0, "trust": 0.9} for k in range(10)
    ]
    clients[9]["flags"] = ["opposed"]
    clients[8]["rejected"] = "left out by Krum(f=1)"
    clients[7]["rejected"] = "too long"
    notes: list[str] = []
    (found,) = figures.cohorts([record(0, clients=clients)], notes, entries=5)
    assert [member[0] for member in found] == [7, 9, 8, 0, 1]
    assert notes == [
        "of each cohort at most 5 clients are listed, the rejected and flagged ones first"
    ]


def test_several_runs_share_the_rows_of_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(figures, "CLIENTS", 8)
    clients = [{"id": k, "weight": 0.1, "loss": 1.0, "sq_norm": 1.0} for k in range(10)]
    folders = [
        write(tmp_path / str(seed), [record(0, clients=clients)], config=changed(seed=seed))
        for seed in range(2)
    ]
    told = report(folders)["runs"]
    assert [(len(run["clients"]), run["clients_left_out"]) for run in told] == [(4, 6), (4, 6)]


def test_a_page_at_the_limits_is_below_5_mb(tmp_path: Path):
    random = np.random.default_rng(1)
    found: list[dict[str, Any]] = []
    for t in range(500):
        cohort = random.choice(5000, 80, replace=False)
        weight, loss, norm, trust = random.random((4, 80)).round(6)
        clients: list[dict[str, Any]] = [
            {"id": int(k), "weight": w / 40, "loss": 1 + x, "sq_norm": 100 + y, "trust": z}
            for k, w, x, y, z in zip(cohort, weight, loss, norm, trust, strict=True)
        ]
        for client in clients:
            if client["trust"] < 0.5:
                client["flags"] = ["drifting", "opposed"]
        for client in clients[:24]:
            client["rejected"] = "left out by MultiKrum(byzantine=24, kept=56)"
        scales = random.normal(1, 0.1, 500).round(6).tolist()
        layers = {
            f"encoder.layers.{k}.attention.weight": {"gsi": 1 + s, "baseline": 1.9, "scale": s}
            for k, s in enumerate(scales)
        }
        figures_of = random.random(5).round(7).tolist()
        keys = ("train_loss", "test_loss", "test_accuracy", "label_similarity", "gsi_unfiltered")
        changes = dict(zip(keys, figures_of, strict=True))
        found.append(record(t, clients=clients, groups=layers, reason=None, **changes))
    counts = random.integers(0, 9, (5000, 100)).tolist()
    view = read(write(tmp_path, labels=counts))
    told = payload([replace(view, rounds=tuple(found))])  # as read, without the reading
    (run,) = told["runs"]
    assert len(run["heat"]["groups"]) == 200  # 100,000 cells / 500 rounds
    assert sum(cohort is not None for cohort in run["labels"]["cohorts"]) == 400
    size = len(page.html(told).encode())
    assert 3e6 < size < 5e6, size


# ----------------------------------------------------------------------------------------- headline


def test_the_headline_of_one_run(tmp_path: Path):
    # the last 10 of 12: .3 · 9 + .5 = 3.2 over 10; three updates of 24 rejected (12.5 %)
    found = rounds([0.1, 0.2, *[0.3] * 9, 0.5])
    for t, flag in {4: "one-sided", 5: "one-sided", 9: "outlier"}.items():
        found[t]["alarm"] = flag
        found[t]["clients"][1]["rejected"] = "too long"
    told = payload([read(write(tmp_path, found, config=changed(rounds=12), finish=True))])
    assert tiles(told) == {
        "Accuracy, last 10 rounds": ("32.0 %", "final 50.0 %", "plain"),
        "Rounds distrusted": ("3 of 12", "2 one-sided; 1 outlier", "bad"),  # a quarter
        "Updates rejected": ("3 of 24", "", "bad"),  # a tenth or more
        "Time": ("18 s", "1.5 s a round", "plain"),  # 12 · 1.5 s
    }
    assert told["groups"] == [
        {"label": "data.name=digits adapter.name=glad", "baseline": False, "runs": [0]}
    ]
    assert (told["version"], told["title"], told["live"]) == (2, tmp_path.name, None)


def test_the_headline_names_the_averaged_model(tmp_path: Path):
    # averages of .9 and .8, models of .8: means .85 and .8, so +5 points
    found = [
        record(t, averaged_accuracy=accuracy, averaged_loss=0.5)
        for t, accuracy in enumerate((0.9, 0.8))
    ]
    config = changed(rounds=2) | {"average": {"name": "window", "size": 4}}
    told = payload([read(write(tmp_path, found, config=config, finish=True))])
    assert tiles(told)["Averaged model"] == (
        "85.0 %",
        "final 80.0 %; +5.00 points over the newest model",
        "plain",
    )
    assert told["runs"][0]["averaged"] == [90, 80]
    assert told["runs"][0]["averaged_loss"] == [0.5, 0.5]
    assert told["average"].startswith("Averaged: the mean of the last 4 models that the server has")


def test_without_an_average_nothing_is_said_of_one(tmp_path: Path):
    told = payload([read(write(tmp_path, [record(0)]))])
    assert (told["average"], told["runs"][0]["averaged"]) == (None, None)
    assert "Averaged model" not in tiles(told)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"name": "ema", "beta": 0.8}, "the last 5 or so count most"),
        ({"name": "ema", "beta": "x"}, "an average of the models"),
        ({"name": "poly"}, "in which later ones count more"),
        ({"name": "mine:Own"}, "an average of the models"),
        ("damaged", "an average of the models"),
    ],
)
def test_every_average_is_said_in_words(tmp_path: Path, section: Any, words: str):
    config = changed(rounds=2) | {"average": section}
    told = payload([read(write(tmp_path, [record(0, averaged_accuracy=0.5)], config=config))])
    assert words in told["average"]


def test_an_average_of_the_optimizer_itself_is_said_in_words(tmp_path: Path):
    config = changed(rounds=2) | {"server": {"name": "schedule-free"}, "average": {"name": "none"}}
    told = payload([read(write(tmp_path, [record(0, averaged_accuracy=0.5)], config=config))])
    assert told["average"].startswith("Averaged: the mean x of all points that the server’s own")


def test_the_summary_has_the_average_where_rounds_are_missing(tmp_path: Path):
    config = changed(rounds=9) | {"average": {"name": "ema", "beta": 0.9}}
    folder = write(tmp_path, [record(0, averaged_accuracy=0.5)], config=config, finish=True)
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"last10_averaged_accuracy": 0.91, "final_averaged_accuracy": 0.92, "rounds": 9}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert tiles(payload([read(folder)]))["Averaged model"][0] == "91.0 %"


def test_what_a_filter_leaves_out_is_not_rejected(tmp_path: Path):
    found = rounds([0.5] * 12)
    for t in range(12):
        found[t]["clients"][0]["rejected"] = "left out by MultiKrum(byzantine=1)"
    found[3]["clients"][1]["rejected"] = "NaN in 'w'"
    told = payload([read(write(tmp_path, found, config=changed(rounds=12), finish=True))])
    assert tiles(told)["Updates rejected"] == (
        "1 of 24",
        "12 left out by the filter or weighting",
        "plain",
    )
    assert told["verdict"].startswith("Too early to say")
    assert told["runs"][0]["rejections"] == [0, 0, 0, 1, *[0] * 8]
    assert told["runs"][0]["cohorts"][0][0][4] == "left out by MultiKrum(byzantine=1)"
    assert told["runs"][0]["clients"] == [
        [0, 12, 2, 0, None],
        [1, 12, 3, 1, "NaN in 'w'"],
    ]


def test_tests_that_are_not_of_every_round_are_called_tests(tmp_path: Path):
    def label(accuracies: list[float | None], **how: Any) -> str:
        config = changed(rounds=len(accuracies), **how)
        told = payload([read(write(tmp_path, rounds(accuracies), config=config, finish=True))])
        return told["headline"][0]["label"]

    assert label([0.5] * 12) == "Accuracy, last 10 rounds"
    assert label([None, 0.5] * 12, eval_every=2) == "Accuracy, last 10 tests"
    assert label([None, 0.5] * 12) == "Accuracy, last 10 tests"  # whatever the settings say
    assert label([None, 0.5] * 3, eval_every=2) == "Accuracy, last 3 tests"
    assert label([None, None, 0.5], eval_every=3) == "Accuracy, last test"


def test_a_run_that_goes_on_says_so(tmp_path: Path):
    told = payload([read(write(tmp_path, rounds([0.5, 0.7])))], live=True)
    assert tiles(told)["Accuracy, last 2 tests"] == (
        "60.0 %",
        "final 70.0 %; round 2 of 3",
        "plain",
    )
    assert told["live"] == {"seconds": 2}
    assert told["verdict"] == (
        f"{EARLY}: accuracy 60.0 % over the last 2 tests, 0 of 2 rounds distrusted."
    )


def test_where_nothing_is_tested_the_loss_is_the_result(tmp_path: Path):
    told = payload([read(write(tmp_path, rounds([None] * 3)))])
    assert tiles(told)["Training loss, last 3 rounds"][:2] == (
        "0.75",
        "no accuracy was measured",
    )
    told = payload([read(write(tmp_path, rounds([None], train_loss=None)))])
    assert tiles(told)["Accuracy"][0] == "–"
    assert told["verdict"].startswith("Neither accuracy nor loss is recorded")


def test_a_summary_counts_where_rounds_are_missing_and_not_where_it_is_wrong(tmp_path: Path):
    folder = write(tmp_path, rounds([0.2, 0.4, 0.6]), finish=True)
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    (folder / "rounds.jsonl").write_text(lines[0] + "\n")
    told = payload([read(folder)])
    assert tiles(told)["Accuracy, last 3 tests"] == ("40.0 %", "final 60.0 %", "plain")
    assert tiles(told)["Time"] == ("4.5 s", "4.5 s a round", "plain")

    folder = write(tmp_path, rounds([0.2, 0.4, 0.6]), finish=True)
    wrong = {**json.loads((folder / "summary.json").read_text()), "last10_accuracy": 0.9}
    (folder / "summary.json").write_text(json.dumps(wrong))
    told = payload([read(folder)])
    assert tiles(told)["Accuracy, last 3 tests"][0] == "40.0 %"
    said = "summary.json has accuracy 90.00 %, its rounds have 40.00 %: the rounds count."
    assert said in told["notes"]


# ------------------------------------------------------------------------------------- several runs


def runs_of(folder: Path, name: str, results: dict[int, list[float]], **how: Any) -> list[Path]:
    finish = how.pop("finish", True)
    return [
        write(
            folder / f"{name}-{seed}",
            rounds(accuracies),
            config=changed(adapter__name=name, seed=seed, **how),
            finish=finish,
        )
        for seed, accuracies in results.items()
    ]


def report(folders: list[Path], **how: Any) -> dict[str, Any]:
    return payload([read(folder) for folder in folders], **how)


def test_seeds_are_one_group_and_the_gain_is_paired(tmp_path: Path):
    glad = runs_of(tmp_path, "glad", {2: [0.84] * 3, 1: [0.83] * 3, 3: [0.88] * 3})
    none = runs_of(tmp_path, "none", {1: [0.80] * 3, 2: [0.82] * 3, 3: [0.84] * 3})
    told = report(glad + none)
    assert told["title"] == "6 runs"
    assert told["groups"] == [
        {"label": "adapter.name=none", "baseline": True, "runs": [3, 4, 5]},
        {"label": "adapter.name=glad", "baseline": False, "runs": [1, 0, 2]},  # by seed
    ]
    assert [run["seed"] for run in told["runs"]] == [f"seed={s}" for s in (2, 1, 3, 1, 2, 3)]
    assert [run["group"] for run in told["runs"]] == [1, 1, 1, 0, 0, 0]
    assert told["runs"][0]["label"] == "adapter.name=glad"
    # .83 .84 .88: mean .85, std sqrt((.0004 + .0001 + .0009) / 2) = .026458
    # differences .03 .02 .04: mean .03, s .01; ± 4.30265 · .01 / sqrt(3) = .0248414
    found = tiles(told)
    assert found["Accuracy, last 3 tests: adapter.name=glad"] == (
        "85.0 ± 2.6 %",
        "final 85.0 %; 3 seeds",
        "plain",
    )
    assert found["Gain over adapter.name=none"] == (
        "+3.00 points",
        "95 % interval +0.52 to +5.48; 3 seeds",
        "good",
    )
    assert found["Time"] == ("27 s", "6 runs; 1.5 s a round", "plain")  # 6 · 3 · 1.5
    wrong = "Nothing is plainly wrong in any of 6 runs, 6 of them too short to judge."
    assert told["verdict"] == wrong


def test_a_loss_that_is_sure_and_one_that_is_not(tmp_path: Path):
    none = runs_of(tmp_path, "none", {1: [0.8], 2: [0.8], 3: [0.8]}, rounds=1)
    worse = runs_of(tmp_path, "glad", {1: [0.7], 2: [0.71], 3: [0.69]}, rounds=1)
    # −.10 −.09 −.11: mean −.1, s .01, ± .0248
    assert tiles(report(none + worse))["Gain over adapter.name=none"] == (
        "−10.00 points",
        "95 % interval −12.48 to −7.52; 3 seeds",
        "bad",
    )
    unsure = runs_of(tmp_path, "glad", {1: [0.9], 2: [0.7], 3: [0.8]}, rounds=1)
    assert tiles(report(none + unsure))["Gain over adapter.name=none"][2] == "plain"


def test_below_three_seeds_there_is_no_interval(tmp_path: Path):
    none = runs_of(tmp_path, "none", {1: [0.5] * 3, 2: [0.6] * 3})
    glad = runs_of(tmp_path, "glad", {1: [0.6] * 3, 2: [0.65] * 3})
    key = "Gain over adapter.name=none"
    assert tiles(report(none[:1] + glad))[key] == (
        "+10.00 points",
        "one seed: no interval",
        "plain",
    )
    assert tiles(report(none + glad))[key] == (
        "+7.50 points",
        "2 seeds: +10.00, +5.00; no interval below 3",
        "plain",
    )


def test_while_a_run_goes_on_both_end_at_the_last_common_test(tmp_path: Path):
    none = runs_of(tmp_path, "none", {1: [0.2, 0.4, 0.9]})
    glad = runs_of(tmp_path, "glad", {1: [0.4, 0.5]}, finish=False)
    # rounds 1 and 2: .45 − .30
    assert tiles(report(none + glad))["Gain over adapter.name=none"] == (
        "+15.00 points",
        "one seed: no interval; up to round 2",
        "plain",
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"data__name": "mnist"}, "the data differ"),
        ({"sampler__name": "md"}, "the cohorts differ"),
        ({}, "they have no seed in common"),
    ],
)
def test_runs_that_are_not_paired_have_no_gain(tmp_path: Path, how: dict[str, str], reason: str):
    none = runs_of(tmp_path, "none", {1: [0.5] * 3})
    other = runs_of(tmp_path, "glad", {1 if how else 2: [0.6] * 3}, **how)
    told = report(none + other)
    assert not [label for label in tiles(told) if "ain over" in label]
    (note,) = [note for note in told["notes"] if "is not paired" in note]
    assert reason in note


def test_the_baseline_that_was_asked_for(tmp_path: Path):
    folders = runs_of(tmp_path, "none", {1: [0.5] * 3}) + runs_of(tmp_path, "glad", {1: [0.6] * 3})
    told = report(folders, baseline="glad")
    assert told["groups"][0] == {"label": "adapter.name=glad", "baseline": True, "runs": [1]}
    assert tiles(told)["Gain over adapter.name=glad"][0] == "−10.00 points"
    with pytest.raises(ReportError, match="baseline 'x' matches no group: choose from adapter"):
        report(folders, baseline="x")


def test_the_same_run_twice_counts_once(tmp_path: Path):
    first, second = (write(tmp_path / name, rounds([0.5] * 3), finish=True) for name in "ab")
    told = report([first, second])
    assert len(told["runs"]) == 1
    assert any(
        f"{second} is left out: the same configuration as {first}" in n for n in told["notes"]
    )


def test_runs_without_settings_are_by_themselves(tmp_path: Path):
    lost = [write(tmp_path / name, rounds([0.5]), config=None) for name in "ab"]
    told = report([*lost, *runs_of(tmp_path, "none", {1: [0.5] * 3})])
    assert [one["label"] for one in told["groups"]] == [
        "data.name=digits adapter.name=none",
        "a (settings not known)",
        "b (settings not known)",
    ]
    assert [one["baseline"] for one in told["groups"]] == [True, False, False]
    assert told["notes"] == [
        "a, b: There is no config.toml: the settings and the seed are not known.",
        "All runs: There is no labels.json: no label distributions can be shown.",
        "a, b: The run is not finished, rounds recorded: 1.",
        "a (settings not known) is not paired with data.name=digits adapter.name=none: settings "
        "are not known.",
        "b (settings not known) is not paired with data.name=digits adapter.name=none: settings "
        "are not known.",
    ]


def test_controls_of_a_rule_are_one_group(tmp_path: Path):
    folders = runs_of(tmp_path, "glad", {1: [0.6] * 3, 2: [0.7] * 3})
    for seed, value in {1: 0.9, 2: 0.8}.items():
        config = changed(seed=seed)
        config["adapter"] = {"name": "fixed", "value": value}
        folder = write(tmp_path / f"c{seed}", rounds([0.5] * 3), config=config, finish=True)
        rule = {"adapter": changed()["adapter"], "factor": value}
        (folder / "control.json").write_text(json.dumps({"control_of": [rule]}))
        folders.append(folder)
    labels = {one["label"]: one["runs"] for one in report(folders)["groups"]}
    assert labels == {"adapter.name=glad": [0, 1], "control of adapter.name=glad": [2, 3]}


@pytest.mark.parametrize(
    ("one_value", "other"),
    [(1, "1"), ("a b=2", "a"), (float("nan"), "NaN"), (10**30, [1, [2]]), ("", " "), (1, 1.0)],
)
def test_settings_of_any_kind_have_labels_that_end(tmp_path: Path, one_value: Any, other: Any):
    folders: list[Path] = []
    for k, value in enumerate((one_value, other)):
        config = changed(server={"lr": "X"})
        folders.append(write(tmp_path / f"{k}", rounds([0.5] * 3), config=config))
        text = (folders[-1] / "config.toml").read_text()
        written = "nan" if isinstance(value, float) and value != value else json.dumps(value)
        (folders[-1] / "config.toml").write_text(text.replace('"X"', written))
    told = report(folders)
    labels = [one["label"] for one in told["groups"]]
    assert len(set(labels)) == len(labels)


def test_a_report_loads_nobodys_own_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "hostile_engine.py").write_text("raise SystemExit('was loaded')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = changed(engine__name="hostile_engine:Engine", adapter__name="hostile_engine:Adapter")
    told = report([write(tmp_path / "run", rounds([0.5]), config=config)])
    assert told["runs"][0]["config"]["engine.name"] == "hostile_engine:Engine"


def test_nothing_to_report():
    with pytest.raises(ReportError, match="no run"):
        payload([])


# ------------------------------------------------------------------------------------------ verdict


def verdict(folder: Path, records: list[dict[str, Any]], planned: int | None = None) -> str:
    config = changed(rounds=planned or len(records) or 3)
    return payload([read(write(folder, records, config=config))])["verdict"]


def test_a_run_with_fewer_rounds_than_its_preset_is_called_shortened(tmp_path: Path):
    config = changed(data__name="mnist") | {"model": {"name": "cnn"}}
    told = payload([read(write(tmp_path / "a", [record(t) for t in range(3)], config=config))])
    assert "Shortened: 3 of 50 rounds." in told["notes"]


def test_a_healthy_run(tmp_path: Path):
    # the best window .9, the last one exactly 10 points below: not yet a collapse
    found = rounds([0.1] + [0.9] * 10 + [0.8] * 10)
    assert verdict(tmp_path, found) == (
        "Training looks healthy: accuracy 80.0 % over the last 10 tests, 0 of 21 rounds distrusted."
    )


def test_a_collapse(tmp_path: Path):
    # the last window: .9 · 5 + .6 · 5 over 10 = .75, 15 points below .9
    assert verdict(tmp_path, rounds([0.1] + [0.9] * 10 + [0.6] * 5)) == (
        "Training needs a look: accuracy fell from 90.0 % to 75.0 % (means over 10 tests)."
    )


def test_accuracy_that_never_rises(tmp_path: Path):
    told = verdict(tmp_path, rounds([0.1] * 20))
    assert told == "Training needs a look: accuracy has not risen from its first 10.0 %."
    assert verdict(tmp_path, rounds([0.1] * 19)).startswith(EARLY)
    assert verdict(tmp_path, rounds([0.1] * 10 + [0.111] * 10)).startswith("Training looks healthy")


def test_a_loss_that_is_no_number(tmp_path: Path):
    found = rounds([0.5, 0.5])
    found[1]["test_loss"] = None
    assert verdict(tmp_path, found) == (
        "Training needs a look: the test loss is no longer a finite number."
    )


def test_where_nothing_is_tested_the_loss_must_not_grow(tmp_path: Path):
    def losses(*values: float) -> list[dict[str, Any]]:
        return [record(t, test_accuracy=None, train_loss=x) for t, x in enumerate(values)]

    # best window 1, the last 10: 5 · 1 + 5 · 4 over 10 = 2.5
    assert verdict(tmp_path, losses(*[1] * 10, *[4] * 5)) == (
        "Training needs a look: the training loss rose from 1 to 2.5 (means over 10 rounds)."
    )
    assert verdict(tmp_path, losses(*[1] * 10, *[3] * 5)).startswith(
        f"{EARLY}: training loss 2 over the last 10 rounds"
    )


def test_skipped_distrusted_and_rejected(tmp_path: Path):
    found = rounds([0.5] * 4)
    for t in (0, 2):
        found[t] |= {"status": "skipped", "reason": f"no update in {t}"}
    assert verdict(tmp_path, found) == (
        "Training needs a look: 2 of 4 rounds were skipped, the last one because no update in 2."
    )
    found = rounds([0.5] * 4)
    found[3]["alarm"] = "outlier"
    assert verdict(tmp_path, found).endswith(": 1 of 4 rounds are distrusted.")
    found = rounds([0.5] * 5)
    found[3]["alarm"] = "outlier"  # a fifth
    found[0]["clients"][0]["rejected"] = "x"  # a tenth
    assert verdict(tmp_path, found).endswith(": 1 of 10 updates were rejected.")


def test_no_rounds(tmp_path: Path):
    assert verdict(tmp_path, []) == "Waiting for the first round."
    (tmp_path / "summary.json").write_text('{"rounds": 3}')
    assert payload([read(tmp_path)])["verdict"] == "Training needs a look: no round can be read."
    folders = [write(tmp_path / name, config=changed(seed=s)) for s, name in enumerate("ab")]
    assert report(folders)["verdict"] == "No run has a round yet."


def test_several_runs_name_those_that_need_a_look(tmp_path: Path):
    bad = runs_of(tmp_path, "none", {s: [0.1] * 20 for s in range(4)}, rounds=20)
    good = runs_of(tmp_path, "glad", {1: [0.1, 0.9]}, rounds=2)
    assert report([*bad[:1], *good])["verdict"] == (
        "1 of 2 runs needs a look: none-0: accuracy has not risen from its first 10.0 %."
    )
    told = report(bad + good)["verdict"]
    assert told.startswith("4 of 5 runs need a look: none-0: ")
    assert told.endswith("; and 1 more.")


def test_times_for_people():
    told = {0: "0.0 s", 9.94: "9.9 s", 59: "59 s", 60: "1 min 0 s", 3599.4: "59 min 59 s"}
    told |= {3600: "1 h 0 min", 86_399: "1 d 0 h", 86_400 * 2.5: "2 d 12 h"}
    assert {seconds: span(seconds) for seconds in told} == told


def test_everything_is_json(tmp_path: Path):
    told = report(runs_of(tmp_path, "none", {1: [0.5] * 3, 2: [0.6] * 3}))
    assert json.loads(page.data(told)) == told


def test_runs_of_other_lengths_are_not_paired(tmp_path: Path):
    folders = [
        write(
            tmp_path / name,
            [record(t, test_accuracy=0.5) for t in range(n)],
            config=changed(rounds=n, adapter__name=rule),
        )
        for name, n, rule in (("glad", 4, "glad"), ("none", 4, "none"), ("short", 2, "none"))
    ]
    told = payload([read(folder) for folder in folders])
    base = next(group for group in told["groups"] if group["baseline"])
    assert [told["runs"][k]["name"] for k in base["runs"]] == ["none"]  # the first without a rule
    assert any("4 and 2 rounds" in note for note in told["notes"])
    assert sum("ain over" in tile["label"] for tile in told["headline"]) == 1


# ------------------------------------------------------------------------------ clients' own scores


def test_the_clients_own_scores(tmp_path: Path):
    def own(mean: float | None, worst: float | None, std: float | None) -> dict[str, Any]:
        return {"score": "accuracy", "count": 4, "mean": mean, "worst_decile": worst, "std": std}

    records = [
        record(0, client_scores=own(0.5, 0.125, 0.625)),
        record(1),
        record(2, client_scores=own(0.75, 0.5, None), averaged_client_scores=own(0.8, 0.6, 0.1)),
        record(3, client_scores=own(None, None, None)),
    ]
    write(tmp_path / "run", records)
    line = {"round": 2, "ids": [0, 1, 9], "scores": [1e9, 0.875, 0.5]}
    (tmp_path / "run" / "client_scores.jsonl").write_text(json.dumps(line) + "\n")
    (run,) = payload([read(tmp_path / "run")])["runs"]
    assert run["own"] == {
        "rounds": [1, 3],  # people count from 1
        "count": [4, 4],
        "mean": [50, 75],
        "worst": [12.5, 50],
        "std": [62.5, None],
        "low": [0, None],  # 50 − 62.5 is no share
        "high": [100, None],
    }
    assert run["averaged_own"]["mean"] == [80]
    assert (run["averaged_own"]["low"], run["averaged_own"]["high"]) == ([70], [90])
    assert [row[0] for row in run["clients"]] == [0, 1]
    assert run["client_columns"]["own"] == [None, 87.5]  # 1e9 is no share


def test_without_them_there_is_nothing_of_them(tmp_path: Path):
    run = one(tmp_path, [record(0)])
    assert (run["own"], run["averaged_own"], run["client_columns"]["own"]) == (None, None, None)
    made = page.html(payload([read(tmp_path)]))
    assert "Clients’ own scores</h2>" in made
    assert '<section id="own-section" aria-labelledby="own-title" hidden>' in made
