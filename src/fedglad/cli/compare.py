"""`fedglad compare`: finished runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedglad.cli.console import console, escape, mistakes, note, print_json, print_wide, say, table
from fedglad.cli.options import BASELINE, AsJson

if TYPE_CHECKING:
    from fedglad.analysis.comparison import Comparison, Difference, Group
    from fedglad.records import Score

app = typer.Typer()


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Runs' folders, or folders of them.")],
    metric: Annotated[
        str | None,
        typer.Option(help="Which number of summary.json; by default the score, last10_accuracy."),
    ] = None,
    baseline: Annotated[str | None, typer.Option(help=BASELINE)] = None,
    target: Annotated[
        str | None,
        typer.Option(help="A score: show the rounds and MB to it. 0.8 or 80%; for MAE 2.5."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the score and GSI by round to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare finished runs: mean and spread over the seeds, and paired differences."""
    from fedglad.analysis.comparison import compare

    with mistakes(ModuleNotFoundError):
        comparison = compare(runs, metric=metric, baseline=baseline, target=target)
        if plot:
            from fedglad.report.plots import comparison as plots

            plots.write(comparison, plot)
    if as_json:
        print_json(comparison.to_dict())
        return
    show_comparison(comparison)
    if plot:
        say(f"Picture: {plot}")


def show_comparison(comparison: Comparison) -> None:
    """The table, the differences by seed, and the notes."""
    rows = [_row(group, comparison) for group in comparison.groups]
    # A column in which no group has anything is left out.
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    made = table("", *heads)
    less = [] if comparison.score.higher else [f"of {comparison.metric} less is better"]
    based = [f"Baseline: {comparison.baseline}"] if len(comparison.groups) > 1 else []
    if based or less:
        made.caption = escape("; ".join([*based, *less]))
        made.caption_justify, made.caption_style = "left", "none"
    for group, row in zip(comparison.groups, rows, strict=True):
        made.add_row(escape(group.label), *(row[head] for head in heads))
    print_wide(made)
    unit = " in percentage points" if comparison.score.share else ""
    if any(group.difference for group in comparison.groups):
        say(f"\nDifferences to {comparison.baseline} by seed{unit}:")
    for group in comparison.groups:
        if group.difference:
            say(f"  {group.label}   {_by_seed(group.difference, comparison)}")
    _show_controls(comparison, unit)
    _show_averages(comparison, unit)
    _show_stability(comparison)
    _show_clients(comparison)
    note(comparison.notes)


def _row(group: Group, comparison: Comparison) -> dict[str, str]:
    """A group's cells by the heads of their columns."""
    from fedglad.records import Score

    numbers = (_number(x, comparison) for x in (group.mean, group.std) if x is not None)
    metric = f"{comparison.metric}{_unit(comparison.score)}"
    cells = {"n": str(len(group.values)), metric: " ± ".join(numbers)}
    if not comparison.metric.startswith("final_"):
        of_final = Score(comparison.final)
        final = "" if group.final_mean is None else of_final.figure(group.final_mean)
        cells[f"final{_unit(of_final)}"] = final
    cells |= _to_target(group, comparison)
    mean, interval = "", ""
    if any(other.difference for other in comparison.groups):
        mean, interval = ("baseline", "") if group.label == comparison.baseline else ("-", "-")
    if group.difference:
        mean, interval = _cells(group.difference, comparison)
    return {**cells, "difference": mean, "95 % interval": interval}


def _to_target(group: Group, comparison: Comparison) -> dict[str, str]:
    """The mean over the runs that reach it, and how many of them do; nothing without a target."""
    if comparison.target is None or not (score := comparison.tested):
        return {}
    rounds = size = "–"
    if (its := group.to_target) and its.rounds is not None:
        rounds = f"{its.rounds:.1f} ({its.reached} of {its.known})"
        if its.bytes is not None:
            size = _megabytes(its.bytes)
    return {f"rounds to {score.text(comparison.target)}": rounds, "MB to it": size}


def _megabytes(size: float) -> str:
    """
    >>> _megabytes(1_234_567_890), _megabytes(1_234_567), _megabytes(800)
    ('1,235', '1.23', '0.0008')
    """
    return f"{size / 1e6:,.0f}" if size >= 1e8 else f"{size / 1e6:.3g}"


def _cells(difference: Difference, comparison: Comparison) -> tuple[str, str]:
    mean, *ends = (
        _number(x, comparison, "+") for x in (difference.mean, *(difference.interval or ()))
    )
    return mean, escape(f"[{', '.join(ends)}]") if ends else "-"


def _show_controls(comparison: Comparison, unit: str) -> None:
    """Newest models against newest models, averages against averages."""
    factors = {group.label: group.factors or [] for group in comparison.groups}
    rules = [(group.label, group.over_controls) for group in comparison.groups]
    if any(controls for _, controls in rules):
        say(f"\nRule − control{unit}:")
    for rule, controls in rules:
        for label, difference in (controls or {}).items():
            constants = factors.get(label, [])
            text = _pair(f"{rule} − {label}", difference, comparison)
            if len({*constants}) > 1:  # one that all have is in the label
                text += f"   (factors {', '.join(f'{factor:.4f}' for factor in constants)})"
            console.print(text, soft_wrap=True)


def _show_averages(comparison: Comparison, unit: str) -> None:
    pairs = [(group, group.over_newest) for group in comparison.groups if group.over_newest]
    if pairs:
        say(f"\nAverage of the models − newest model, of the same runs{unit}:")
    for group, difference in pairs:
        console.print(_pair(group.averaged_of or "", difference, comparison), soft_wrap=True)


def _pair(label: str, difference: Difference, comparison: Comparison) -> str:
    """A paired difference in one line: its mean, its interval, and that of every seed."""
    mean, interval = _cells(difference, comparison)
    text = f"  {escape(label)}   {mean} {interval}".removesuffix(" -")
    return f"{text}   by seed {escape(_by_seed(difference, comparison))}"


def _show_stability(comparison: Comparison) -> None:
    steady = [(group.label, group.stability) for group in comparison.groups if group.stability]
    if steady and (score := comparison.tested):
        console.print(f"\nTest {score.words} in the second half of the rounds, mean over the runs:")
        made = table("", *(f"{head}{_unit(score)}" for head in ("std", "worst round")))
        for name, its in steady:
            made.add_row(escape(name), score.figure(its.std), score.figure(its.worst))
        print_wide(made)


def _show_clients(comparison: Comparison) -> None:
    of_clients = [(group.label, group.clients) for group in comparison.groups if group.clients]
    if not of_clients:
        return
    score = of_clients[0][1].score
    heads = [f"{head}{_unit(score)}" for head in ("mean", "worst tenth", "std")]
    console.print(f"\n{score.title} of single clients when tested last, mean over the runs:")
    made = table("", *heads)
    for name, its in of_clients:
        figures = (its.mean, its.worst_decile, its.std)
        made.add_row(escape(name), *(its.score.figure(figure) for figure in figures))
    print_wide(made)


def _by_seed(difference: Difference, comparison: Comparison) -> str:
    from fedglad.analysis.grouping import varying_seeds

    names = varying_seeds([seed for group in comparison.groups for seed in group.seeds])
    pairs = zip(difference.seeds, difference.values, strict=True)
    return ",  ".join(
        f"{'/'.join(str(seed.get(name)) for name in names)}: {_number(value, comparison, '+')}"
        for seed, value in pairs
    )


def _unit(score: Score) -> str:
    return " %" if score.share else ""


def _number(value: float, comparison: Comparison, sign: str = "") -> str:
    return comparison.score.figure(value, sign=sign)
