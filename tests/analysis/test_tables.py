"""A comparison as LaTeX, Markdown and CSV: what is in it, and that LaTeX can set it."""

import csv
import io
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedglad.analysis.comparison import Best, Comparison, Difference, Group, ToTarget, compare
from fedglad.analysis.grouping import CompareError
from fedglad.analysis.tables import (
    COLUMNS,
    IN_ROWS,
    as_csv,
    columns,
    differences,
    escaped,
    latex,
    layout,
    markdown,
)
from fedglad.records import Score

HOSTILE = r"a_b\% {$x$} #1 ^~ & [2] * <|> " + '"q" α·Ω − 5 – ∞ ä'


def group(label: str, values: list[float], **more: Any) -> Group:
    mean = sum(values) / len(values)
    seeds = [{"seed": k} for k, _ in enumerate(values)]
    std = 0.01 if len(values) > 1 else None
    return Group(label, {"adapter.name": label}, [], seeds, values, mean, std, mean, **more)


def made(*groups: Group, **more: Any) -> Comparison:
    return Comparison("last10_accuracy", "none", list(groups), [], **more)


ONE = made(
    group("none", [0.5, 0.7]),
    group("glad", [0.7, 0.8], difference=Difference([], [], 0.0625, (-0.125, 0.25))),
)
TWO = made(
    group("none", [0.5], block="a=1"),
    group("none", [0.9], block="a=2"),
    group("glad", [0.75], block="a=2"),
    group("exp", [0.9], block="a=2"),
    blocks={"a=1": {"a": 1}, "a=2": {"a": 2}},
)


# -------------------------------------------------------------------------------------- columns


def test_the_usual_columns_are_those_with_something_in_them():
    assert [c.name for c in columns(ONE)] == ["n", "score", "final", "difference", "interval"]
    assert [c.name for c in columns(made(group("none", [0.5])))] == ["n", "score", "final"]
    texts = {c.name: c.texts for c in columns(ONE)}
    assert texts["score"] == ["60.00 ± 1.00", "75.00 ± 1.00"]
    assert texts["difference"] == ["baseline", "+6.25"]
    assert texts["interval"] == ["", "[-12.50, +25.00]"]


def test_columns_that_are_chosen_come_in_their_order():
    its = ToTarget(1, 2, 7.0, 2_500_000.0, [7, None])
    row = group("glad", [0.5, 0.75], to_target=its, best=Best(0.875, [1.0, 0.75], "test"))
    found = columns(made(row, target=0.5), list(reversed(COLUMNS)))
    assert [c.name for c in found] == [*reversed(COLUMNS)]
    texts = {c.name: c.texts[0] for c in found}
    assert texts == {
        "n": "2",
        "score": "62.50 ± 1.00",
        "mean": "62.50",
        "std": "1.00",
        "final": "62.50",
        "best": "87.50",
        "rounds": "7.0 (1 of 2)",
        "bytes": "2.5",
        "difference": "",
        "interval": "",
    }
    assert [c.name for c in columns(ONE, ["last10"])] == ["score"]  # as it is what is compared


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["finale"], "unknown column 'finale'; did you mean 'final'?: choose from n, score, mean,"),
        (["bytes"], "the column 'bytes' is that to a target: give one, --target 0.8"),
    ],
)
def test_columns_that_there_are_not(names: list[str], message: str):
    with pytest.raises(CompareError) as caught:
        columns(ONE, names)
    assert str(caught.value).startswith(message)


def test_every_column_has_its_place_in_a_data_frame():
    assert IN_ROWS.keys() == {*COLUMNS}
    rows = made(group("none", [0.5]), target=0.5).rows()
    assert {name for few in IN_ROWS.values() for name in few} <= rows[0].keys()


def test_the_best_are_those_that_look_the_best():
    close = made(*(group(str(x), [x]) for x in (0.90004, 0.90001, 0.8)))
    (column,) = columns(close, ["score"])
    assert column.best([0, 1, 2]) == {0, 1}  # both are 90.00
    assert column.best([2]) == column.best([0, 1]) == set()  # alone, and all alike
    mae = Score("mae", higher=False)
    less = Comparison("last10_mae", "a", close.groups, [], score=mae, tested=mae)
    assert columns(less, ["score"])[0].best([0, 1, 2]) == {2}
    assert columns(close, ["n"])[0].best([0, 1, 2]) == set()


def test_a_mean_over_some_of_the_runs_is_not_the_best():
    some, slow, quick = (
        ToTarget(1, 2, 3.0, 3e6, [3, None]),
        ToTarget(2, 2, 9.0, 9e6, [9, 9]),
        ToTarget(2, 2, 8.0, 8e6, [8, 8]),
    )
    found = made(*(group(f"{k}", [0.5], to_target=t) for k, t in enumerate((some, slow, quick))),
                 target=0.5)  # fmt: skip
    assert [column.best([0, 1, 2]) for column in columns(found, ["rounds", "bytes"])] == [{2}, {2}]


def test_differences_name_their_block():
    row = group("glad", [0.5], difference=Difference([{"seed": 1}], [0.125], 0.125, None))
    found = made(replace(row, block="a=1"), blocks={"a=1": {}, "a=2": {}})
    assert differences(found) == [
        ("Differences to none by seed in percentage points:", ["a=1: glad   1: +12.50"])
    ]


# --------------------------------------------------------------------------------------- layout


def test_methods_are_rows_and_blocks_beside_each_other():
    found = layout(TWO)
    assert (found.spans, found.heads) == (["a=1", "a=2"], ["last10_accuracy %"] * 2)
    rows = [(label, [(cell.text, cell.best) for cell in cells]) for label, cells in found.rows]
    assert rows == [
        ("none", [("50.00", False), ("90.00", True)]),
        ("glad", [("", False), ("75.00", False)]),
        ("exp", [("", False), ("90.00", True)]),
    ]


def test_an_average_stands_below_its_models():
    groups = (
        *(group("none", [0.5], block="a=1"), group("glad", [0.5], block="a=1")),
        group("none", [0.5], block="a=2"),
        group("none · averaged", [0.5], block="a=2", averaged_of="none"),
    )
    found = layout(made(*groups, blocks={"a=1": {}, "a=2": {}}))
    assert [label for label, _ in found.rows] == ["none", "none · averaged", "glad"]


def test_what_is_to_be_known_stands_beside_the_table():
    noted = replace(TWO, notes=["a\nb"], tests=(4, 4))
    assert markdown(noted).splitlines()[-2:] == [
        "- Baseline in each block: none; last10_accuracy is over the last 4 tests, as runs have "
        "no more.",
        "- Note: a b.",
    ]
    spread = replace(TWO, groups=[group("none", [0.5, 0.75], block="a=1")])
    assert "% last10_accuracy %: mean ± sample standard deviation of 2 runs." in latex(spread)
    assert "% Note: a b.\n" in latex(noted)


# ---------------------------------------------------------------------------------- the formats


def test_markdown():
    assert markdown(TWO).splitlines()[:5] == [
        "|  | a=1 | a=2 |",
        "| :-- | --: | --: |",
        "| none | 50.00 | **90.00** |",
        "| glad |  | 75.00 |",
        "| exp |  | **90.00** |",
    ]
    heads = markdown(TWO, ["n", "final"]).splitlines()[0]
    assert heads == "|  | a=1: n | a=1: final % | a=2: n | a=2: final % |"
    assert r"| a\|b |" in markdown(made(group("a|b", [0.5])))


def test_csv_has_the_numbers_as_they_are():
    rows = list(csv.DictReader(io.StringIO(as_csv(ONE))))
    assert [row["label"] for row in rows] == ["none", "glad"]
    assert float(rows[1]["mean"]) == ONE.groups[1].mean
    assert (rows[1]["difference"], rows[1]["low"], rows[1]["high"]) == ("0.0625", "-0.125", "0.25")
    assert rows[0]["difference"] == ""
    short = as_csv(TWO, ["score", "interval"]).splitlines()
    assert short[0] == "block,label,a,adapter.name,metric,mean,std,low,high"
    assert short[1] == "a=1,none,1,none,last10_accuracy,0.5,,,"


def test_latex_of_one_block():
    assert latex(ONE).splitlines()[3:] == [
        r"\begin{tabular}{lrrrrr}",
        r"\toprule",
        r" & n & last10\_accuracy \% & final \% & difference & 95 \% interval \\",
        r"\midrule",
        r"none & $2$ & $60.00 \pm 1.00$ & $60.00$ & baseline &  \\",
        r"glad & $2$ & $\mathbf{75.00} \pm 1.00$ & $\mathbf{75.00}$ & $+6.25$ & "
        r"$[-12.50, +25.00]$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_latex_of_several_columns_in_each_block():
    assert latex(TWO, ["score", "n"]).splitlines()[2:9] == [
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r" & \multicolumn{2}{c}{a=1} & \multicolumn{2}{c}{a=2} \\",
        r"\cmidrule(lr){2-3}\cmidrule(lr){4-5}",
        r" & last10\_accuracy \% & n & last10\_accuracy \% & n \\",
        r"\midrule",
        r"none & $50.00$ & $1$ & $\mathbf{90.00}$ & $1$ \\",
    ]


COMMAND = re.compile(r"\\(?:[A-Za-z]+|[\\&%$#_{}])")


def faults(tex: str) -> list[str]:
    """What would keep LaTeX from setting a tabular, or make it set something else."""
    body = "\n".join(line for line in tex.splitlines() if not line.startswith("%"))
    found: list[str] = []
    plain = re.sub(r"\\[\\&%$#_{}]", "", body.replace(r"\\", "\n"))
    depth = 0
    for char in plain:
        depth += (char == "{") - (char == "}")
        found += ["brace"] if depth < 0 else []
    found += ["brace"] if depth else []
    if [*re.findall(r"\\(begin|end)\{(\w+)\}", body)] != [("begin", "tabular"), ("end", "tabular")]:
        found.append("environment")
    if plain.count("$") % 2:
        found.append("formula")
    outside = "".join(plain.split("$")[::2])
    found += [c for c in "%#_^~" if c in outside]
    width = re.search(r"\\begin\{tabular\}\{([lrc]+)\}", body)
    assert width
    for line in (line for line in body.splitlines() if line.endswith(r"\\")):
        spans = [int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line)]
        cells = 1 + len(re.findall(r"(?<!\\)&", line)) + sum(spans)
        found += [] if cells == len(width[1]) else [f"{cells} cells: {line}"]
        found += ["argument"] if re.match(r"\s*[\[*]", line) else []
    known = {"toprule", "midrule", "bottomrule", "cmidrule", "multicolumn", "begin", "end"}
    known |= {"mathbf", "textbf", "pm", "cdot", "to", "infty", "alpha", "Omega", "tabular"}
    known |= {f"text{x}" for x in ("backslash", "asciitilde", "asciicircum", "less", "greater")}
    named = set(re.findall(r"\\([A-Za-z]+)", body)) - known - {"textbar"}
    return found + sorted(named)


@pytest.mark.parametrize("names", [None, ["score", "best", "difference", "interval", "n"]])
@pytest.mark.parametrize("found", [ONE, TWO], ids=["one", "several"])
def test_latex_is_well_formed_whatever_things_are_called(found: Comparison, names: Any):
    blocks = {f"{HOSTILE}{key}": value for key, value in found.blocks.items()}
    groups = [
        replace(one, label=f"{HOSTILE}{one.label}", block=f"{HOSTILE}{one.block}" if blocks else "")
        for one in found.groups
    ]
    hostile = replace(found, groups=groups, blocks=blocks, notes=[HOSTILE, "a\n\\end{tabular}"])
    assert faults(latex(hostile, names)) == []
    assert faults(latex(found, names)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "a_b & 1 \\\\",
        "a & 1 & 2 \\\\",
        "a & {1 \\\\",
        "a & 5 % \\\\",
        "a & $1 \\\\",
        "[a] & 1 \\\\",
        "a & \\unknown \\\\",
    ],
)
def test_the_checks_find_what_is_wrong(wrong: str):
    whole = "\\begin{tabular}{lr}\n\\toprule\nx & y \\\\\nROW\n\\end{tabular}\n"
    assert faults(whole.replace("ROW", r"a & $1 \pm 2$ \\")) == []
    assert faults(whole.replace("ROW", wrong)) != []


@given(st.text())
def test_any_text_is_escaped(text: str):
    tex = escaped(text)
    assert "\n" not in tex
    bare = COMMAND.sub("", tex)
    assert not set("%#_^~&\\") & set(re.sub(r"\$[^$]*\$", "", bare))
    assert bare.count("{") == bare.count("}")


def test_latex_compiles(tmp_path: Path, finished: Any):
    """Of real runs' folders, with hostile names, in one block and in several."""
    if not (program := shutil.which("pdflatex")):
        pytest.skip("no pdflatex: install it (Debian: apt-get install texlive-latex-recommended)")
    folders = [
        finished(0.5 + seed / 10 + alpha / 100, seed=seed, data__alpha=alpha, adapter__name=name)
        for alpha in (0.1, 1.0)
        for name in ("none", "glad", "fedexp", "pooled")
        for seed in (1, 2, 3)
    ]
    alias = {"adapter.name=glad": HOSTILE, "data.alpha": "α", "adapter.name=fedexp": "[γ] *"}
    wide = latex(compare(folders, alias=alias))
    long = latex(compare(folders, alias=alias), ["score", "difference", "interval"])
    flat = latex(compare(folders[:12], alias={"adapter.name=glad": HOSTILE}))
    tables = "\n\n".join((wide, long, flat))
    text = (
        "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
        f"{tables}\n\\end{{document}}\n"
    )
    (tmp_path / "paper.tex").write_text(text)
    done = subprocess.run(
        [program, "-interaction=nonstopmode", "-halt-on-error", "paper.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "paper.pdf").stat().st_size > 1000
