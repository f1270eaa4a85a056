"""Methods × settings: blocks with a baseline each, which runs are taken, and other names."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fedglad.analysis.blocks import renaming
from fedglad.analysis.comparison import Comparison, compare
from fedglad.analysis.grouping import CompareError
from fedglad.analysis.tables import caption, columns

NAMES = ("none", "glad")
ALPHAS = (0.1, 1.0)


def shape(found: Comparison) -> list[tuple[str, str]]:
    return [(group.block, group.label) for group in found.groups]


BOTH = [
    ("data.alpha=0.1", "adapter.name=none"),
    ("data.alpha=0.1", "adapter.name=glad"),
    ("data.alpha=1.0", "adapter.name=none"),
    ("data.alpha=1.0", "adapter.name=glad"),
]

# --------------------------------------------------------------------------------------- blocks


def test_every_block_has_its_baseline(crossed: list[Path]):
    found = compare(crossed)
    assert shape(found) == BOTH
    assert found.baseline == "adapter.name=none"
    assert found.blocks == {f"data.alpha={a}": {"data.alpha": a} for a in ALPHAS}
    assert found.notes == []
    none, glad, others, other = found.groups
    assert none.difference is others.difference is None
    assert glad.difference
    assert other.difference
    # alpha .1: .73 - .70, .74 - .72, .78 - .74: .03, .02, .04, mean .03, s .01, t 4.30265
    assert glad.difference.values == pytest.approx([0.03, 0.02, 0.04])
    assert glad.difference.interval == pytest.approx((0.0051586, 0.0548414), abs=1e-6)
    # alpha 1: −.01, .01, .03: mean .01, s .02, half the interval 4.30265 · .02 / √3 = .0496827
    assert other.difference.values == pytest.approx([-0.01, 0.01, 0.03])
    assert other.difference.interval == pytest.approx((-0.0396827, 0.0596827), abs=1e-6)


def test_a_baseline_is_the_same_method_in_every_block(crossed: list[Path]):
    for text in ("glad", "adapter.name=glad"):
        found = compare(crossed, baseline=text)
        assert found.baseline == "adapter.name=glad"
        assert [group.label for group in found.groups] == ["adapter.name=glad", BOTH[0][1]] * 2
        means = [one.mean for group in found.groups if (one := group.difference)]
        assert means == pytest.approx([-0.03, -0.01])
    aliased = compare(crossed, baseline="Ours", alias={"adapter.name=glad": "Ours"})
    assert aliased.baseline == "Ours"
    with pytest.raises(CompareError, match="'fedexp' matches no group: choose from"):
        compare(crossed, baseline="fedexp")


def test_blocks_of_the_order_in_which_they_are_met_have_the_same_rows(crossed: list[Path]):
    assert shape(compare(crossed[::-1])) == [*BOTH[2:], *BOTH[:2]]


def test_one_method_on_several_data_makes_no_blocks(crossed: list[Path]):
    found = compare([*crossed[:3], *crossed[6:9]])
    assert shape(found) == [("", "data.alpha=0.1"), ("", "data.alpha=1.0")]
    assert found.blocks == {}
    # Nor does a second method that only one of the blocks has.
    flat = compare(crossed[:9])
    assert flat.groups[0].label == "adapter.name=none data.alpha=0.1"
    assert flat.blocks == {}
    assert len(compare(crossed[:9], by=["data"]).blocks) == 2


def test_a_block_without_the_baseline_is_named(crossed: list[Path]):
    found = compare([*crossed[:6], *crossed[9:]], by=["data.alpha"])
    assert shape(found) == [*BOTH[:2], BOTH[3]]
    assert found.notes == [
        "data.alpha=1.0 has no run of the baseline adapter.name=none: no differences"
    ]
    assert [group.difference is None for group in found.groups] == [True, False, True]


def test_blocks_by_other_keys(finished: Any):
    folders = [
        finished(0.5, rounds=rounds, adapter__name=name) for rounds in (5, 7) for name in NAMES
    ]
    assert compare(folders).blocks == {}
    found = compare(folders, by=["rounds"])
    assert [*found.blocks] == ["rounds=5", "rounds=7"]
    assert [group.label for group in found.groups] == ["adapter.name=none", "adapter.name=glad"] * 2
    assert found.notes == []  # as within a block all have as many rounds
    assert all(group.difference for group in found.groups[1::2])
    across = compare(folders, by="adapter")  # one key need not be a list
    assert [*across.blocks] == ["adapter.name=none", "adapter.name=glad"]
    assert compare(folders, by=["data"]).blocks == {}  # they all share the data


def test_no_blocks_if_none_are_wanted(crossed: list[Path]):
    found = compare(crossed, by=[])
    assert found.blocks == {}
    assert len(found.groups) == 4
    assert any("the data differ" in note for note in found.notes)


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("data.alhpa", "no run has that key; did you mean 'data.alpha'?"),
        ("seed", "runs that differ in it are repetitions"),
    ],
)
def test_blocks_by_what_is_no_key(crossed: list[Path], by: str, message: str):
    with pytest.raises(CompareError) as caught:
        compare(crossed, by=[by])
    assert message in str(caught.value)


def test_what_goes_with_a_block_is_no_method_and_is_said(finished: Any):
    """A rate for each partition, as some presets have."""
    rates = {0.1: 0.5, 1.0: 1.0}
    folders = [
        finished(0.5, data__alpha=alpha, adapter__name=name, server__lr=lr)
        for alpha, lr in rates.items()
        for name in NAMES
    ]
    found = compare(folders)
    assert shape(found) == BOTH
    assert found.notes == [
        "not the same in all blocks: server.lr=0.5 where data.alpha=0.1; "
        "server.lr=1.0 where data.alpha=1.0"
    ]


def test_models_and_samplers_make_blocks_together(finished: Any):
    kinds = ({"model__name": "mlp", "model__features": 64}, {"sampler__clients_per_round": 7})
    folders = [finished(0.5, adapter__name=name, **kind) for kind in kinds for name in NAMES]
    assert [*compare(folders).blocks] == [
        "model.name=mlp sampler.clients_per_round=5",
        "model.name=small-cnn sampler.clients_per_round=7",
    ]


def test_a_constant_tuned_in_each_block_is_one_method(finished: Any):
    on = [{"seed": 1, "data.seed": 0}]
    folders: list[Path] = []
    for alpha, factor in ((0.1, 1.5), (1.0, 2.0)):
        for seed in (1, 2):
            folders.append(finished(0.8, seed=seed, data__alpha=alpha))
            fixed = {"adapter__name": "fixed", "adapter__value": factor}
            best = finished(0.82, seed=seed, data__alpha=alpha, **fixed)
            entry = {"kind": "tuned", "factor": factor, "by": "x", "among": [1.5, 2], "on": on}
            (best / "control.json").write_text(json.dumps({"control_of": [entry]}))
            folders.append(best)
    found = compare(folders)
    assert shape(found) == [
        *(("data.alpha=0.1", label) for label in ("adapter.name=glad", "tuned constant")),
        *(("data.alpha=1.0", label) for label in ("adapter.name=glad", "tuned constant")),
    ]
    assert [group.factors for group in found.groups] == [None, [1.5, 1.5], None, [2.0, 2.0]]
    over = [group.over_controls for group in found.groups[::2]]
    assert [[*one] for one in over if one] == [["tuned constant"]] * 2
    chosen = [note for note in found.notes if "the best of 1.5, 2" in note]
    assert [note.split(": ")[0] for note in chosen] == ["data.alpha=0.1", "data.alpha=1.0"]


# ------------------------------------------------------------------------- which runs are taken


@pytest.mark.parametrize(
    ("where", "runs"),
    [
        ({"data.alpha": 1.0}, 6),
        ({"data.alpha": 1, "adapter.name": ["glad"]}, 3),
        ({"seed": [1, 3]}, 8),
        ({"adapter.name": ("none", "glad"), "seed": 2}, 4),
    ],
)
def test_only_the_runs_that_are_asked_for(crossed: list[Path], where: Any, runs: int):
    found = compare(crossed, where=where)
    assert sum(len(group.values) for group in found.groups) == runs


def test_what_is_not_asked_for_is_not_read(crossed: list[Path], finished: Any):
    unfinished = finished(None, data__alpha=1.0, seed=9)
    broken = finished(0.5, data__alpha=5.0)
    (broken / "rounds.jsonl").write_text("{")
    assert compare([*crossed, unfinished, broken], where={"data.alpha": 0.1}).notes == []


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"data.alfa": 1}, "where 'data.alfa': no run has that key; did you mean 'data.alpha'?"),
        ({"data.alpha": [0.1, 2]}, "where data.alpha=2: no run has that value, they have 0.1, 1.0"),
        ({"format": 9}, "where format=9: no run has that value, they have 1"),
    ],
)
def test_a_key_or_a_value_that_no_run_has(crossed: list[Path], where: Any, message: str):
    with pytest.raises(CompareError) as caught:
        compare(crossed, where=where)
    assert message in str(caught.value)


def test_values_that_no_run_has_together(crossed: list[Path]):
    with pytest.raises(CompareError, match=r"no finished run to compare with seed=3 data\.alpha"):
        compare([crossed[0], crossed[8]], where={"seed": 3, "data.alpha": 0.1})


# ------------------------------------------------------------------------------------ other names


@pytest.mark.parametrize(
    ("alias", "text", "shown"),
    [
        ({"adapter.name=glad": "FedGLAD"}, "adapter.name=glad", "FedGLAD"),
        ({"adapter.name=glad": "G"}, "adapter.name=glad adapter.gamma=0.1", "G adapter.gamma=0.1"),
        ({"data.alpha": "α"}, "data.alpha=0.1", "α=0.1"),
        ({"a=1": "b=2", "b=2": "c"}, "a=1 b=2", "b=2 c"),  # in one pass
        ({"a=1": "x", "a=1 b=2": "both"}, "a=1 b=2", "both"),  # the longest first
        ({"a=1": "x"}, "a=11 ba=1 a.a=1", "a=11 ba=1 a.a=1"),
        ({"a.b": "x"}, "axb=1", "axb=1"),
    ],
)
def test_an_alias_is_a_label_or_whole_words_of_it(alias: Any, text: str, shown: str):
    assert renaming(alias)(text) == shown


def test_other_names_are_everywhere(crossed: list[Path]):
    alias = {"adapter.name=none": "FedAvg", "adapter.name=glad": "FedGLAD", "data.alpha": "α"}
    found = compare(crossed, alias=alias)
    assert shape(found) == [
        (block, label) for block in ("α=0.1", "α=1.0") for label in ("FedAvg", "FedGLAD")
    ]
    assert found.baseline == "FedAvg"
    assert [*found.blocks] == ["α=0.1", "α=1.0"]
    flat = compare(crossed[:6], alias={"adapter.name=glad": "ours", "last10_accuracy": "Accuracy"})
    assert [group.label for group in flat.groups] == ["adapter.name=none", "ours"]
    assert [column.head for column in columns(flat)][1] == "Accuracy %"


@pytest.mark.parametrize(
    ("alias", "message"),
    [
        ({"adapter.name=glda": "G"}, "no part of a label; did you mean 'adapter.name=glad'?"),
        ({"adapter.name=glad": " "}, "has an empty name"),
        (
            {"adapter.name=none": "A", "adapter.name=glad": "A"},
            "several groups the name 'A': adapter.name=none; adapter.name=glad",
        ),
    ],
)
def test_an_alias_that_names_nothing_or_the_same(crossed: list[Path], alias: Any, message: str):
    with pytest.raises(CompareError) as caught:
        compare(crossed, alias=alias)
    assert message in str(caught.value)


# -------------------------------------------------------------------------------- numbers of runs


def with_rounds(folder: Path, **fields: list[float]) -> Path:
    """Writes rounds with these fields, and no summary but how many there are."""
    rows = [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
    lines = [json.dumps({"round": t, "status": "stepped", **row}) for t, row in enumerate(rows)]
    (folder / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_the_best_round_is_chosen_on_the_test_set_and_said_to_be(finished: Any):
    folders = [
        with_rounds(finished(0.5, seed=1), test_accuracy=[0.5, 0.75, 0.25]),
        with_rounds(finished(0.5, seed=2), test_accuracy=[0.5, 0.25, 0.875]),
    ]
    found = compare(folders)
    best = found.groups[0].best
    assert best
    # the most of each: .75 and .875, mean .8125
    assert (best.values, best.mean, best.by) == ([0.75, 0.875], 0.8125, "test")
    (column,) = columns(found, ["best"])
    assert (column.head, column.texts) == ("best chosen on test %", ["81.25"])


def test_a_validation_set_chooses_the_best_round(finished: Any):
    fields = {
        "test_accuracy": [0.5, 0.9, 0.7],
        "validation_accuracy": [0.4, 0.5, 0.6],  # the last
        "averaged_accuracy": [0.6, 0.7, 0.8],
        "averaged_validation_accuracy": [0.1, 0.9, 0.2],  # the second
    }
    folder = with_rounds(finished(0.5), **fields)
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"last10_averaged_accuracy": 0.7, "final_averaged_accuracy": 0.8}
    (folder / "summary.json").write_text(json.dumps(summary))
    found = compare([folder])
    assert [(g.best.mean, g.best.by) for g in found.groups if g.best] == [
        (0.7, "validation"),
        (0.7, "averaged_validation"),
    ]
    assert columns(found, ["best"])[0].head == "best by validation %"
    # With a run that has no such set, the test set chooses everywhere.
    bare = with_rounds(finished(0.5, rounds=9), test_accuracy=[0.1, 0.2, 0.1])
    both = compare([folder, bare])
    assert [(g.best.mean, g.best.by) for g in both.groups if g.best and not g.averaged_of] == [
        (0.9, "test"),
        (0.2, "test"),
    ]


def test_averaged_models_can_be_left_out(finished: Any):
    folder = finished(0.5)
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"last10_averaged_accuracy": 0.75, "final_averaged_accuracy": 0.8}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert len(compare([folder]).groups) == 2
    assert [group.label for group in compare([folder], averaged=False).groups] == ["all runs"]


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ([4], "last10_accuracy is over the last 4 tests, as runs have no more"),
        ([1], "last10_accuracy is over the last 1 test, as runs have no more"),
        ([3, 12], "last10_accuracy is over the last 3 to 10 tests, as runs have no more"),
        ([10, 12], ""),
    ],
)
def test_a_mean_over_fewer_than_ten_is_not_called_one_over_ten(
    finished: Any, tests: list[int], words: str
):
    folders = [
        with_rounds(finished(0.5, seed=seed), test_accuracy=[0.5] * many)
        for seed, many in enumerate(tests)
    ]
    assert caption(compare(folders)) == words
    assert caption(compare(folders, metric="final_accuracy")) == ""


# ------------------------------------------------------------------------------------- data frames


def test_a_data_frame_has_a_row_for_each_group(crossed: list[Path]):
    frame = compare(crossed).frame()
    assert frame["data.alpha"].tolist() == [0.1, 0.1, 1.0, 1.0]
    assert frame["adapter.name"].tolist() == ["none", "glad"] * 2
    assert frame["mean"].tolist() == pytest.approx([0.72, 0.75, 0.90, 0.91])
    assert frame["difference"].tolist()[1::2] == pytest.approx([0.03, 0.01])
    assert frame["low"].isna().tolist() == [True, False] * 2
    table = frame.pivot_table("mean", "adapter.name", "data.alpha")
    assert table.loc["glad", 0.1] == pytest.approx(0.75)


def test_a_data_frame_needs_pandas(crossed: list[Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(CompareError, match="a data frame needs pandas: pip install pandas"):
        compare(crossed).frame()
