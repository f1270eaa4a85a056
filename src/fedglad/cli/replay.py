"""`fedglad replay`: what other settings would have done to the factors of a recorded run."""

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedglad.analysis.recording import Recording, ReplayError, read
from fedglad.analysis.replaying import (
    Replayed,
    ReplayedRound,
    Spread,
    Summary,
    own_rule,
    replay,
    require_replayable,
    rule,
    settings,
)
from fedglad.cli.console import WIDE, console, error, warn
from fedglad.config.keys import shown
from fedglad.config.schema import ConfigError, parse_value
from fedglad.runs.sweeping import parse_grids

app = typer.Typer()

SHOWN = 10  # rounds, unless all are asked for

CAUTION = (
    "These are the factors for these same rounds, not a forecast: with other factors the model "
    "would have moved elsewhere, and later updates would have been others."
)


@app.command("replay")
def show_replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key: adapter.gamma=0.05"),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=V1,V2", help="Values to go through."),
    ] = None,
    population: Annotated[
        int | None,
        typer.Option(min=1, help="How many clients there are, if the run does not tell."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every round.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write to FILE.csv (a line a round) or FILE.json (all).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON only.")] = False,
) -> None:
    """Show what other settings, groupings or rules would have done to a run's factors."""
    try:
        if out and out.suffix not in (".csv", ".json"):
            raise ConfigError(f"--out {out}: choose a name that ends in .csv or .json")
        record = read(run, population=population)
        found = {
            _label(given): _replayed(record, given)
            for given in _combinations(set_ or [], grid or [])
        }
        if out:
            text = _csv(found) if out.suffix == ".csv" else _json(run, found)
            out.write_text(text, "utf-8", newline="")
    except OSError as mistake:
        error(f"{out} cannot be written: {mistake.strerror}; choose another --out")
        raise typer.Exit(2) from None
    except (ReplayError, ConfigError) as mistake:
        error(str(mistake))
        raise typer.Exit(2) from None
    if as_json:
        sys.stdout.write(_json(run, found))
        return
    _show(run, record, found, every=every)
    if out:
        console.print(f"Written: {escape(str(out))}", soft_wrap=True)


def _combinations(given: Sequence[str], grids: Sequence[str]) -> list[dict[str, Any]]:
    """The settings of every replay; one that changes nothing if none are given."""
    pairs = [item.partition("=") for item in given]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(
                f"--set {key!r}: write it as KEY=VALUE, for example adapter.gamma=0.05"
            )
    fixed = {key.strip(): parse_value(value.strip()) for key, _, value in pairs}
    values = parse_grids(grids) if grids else {}
    if both := sorted(values.keys() & fixed.keys()):
        raise ConfigError(f"{both[0]!r} is both set and in a grid: leave one of them out")
    return [
        {**fixed, **dict(zip(values, chosen, strict=True))} for chosen in product(*values.values())
    ]


def _replayed(record: Recording, given: Mapping[str, Any]) -> Replayed:
    try:
        return replay(record, rule(record.config, given))
    except (ReplayError, ConfigError) as mistake:
        told = f"  (with {_label(given)})" if len(given) > 1 else ""
        raise ReplayError(f"{mistake}{told}") from None


def _label(given: Mapping[str, Any]) -> str:
    told = (f"{k}={v if isinstance(v, float) else shown(v)}" for k, v in given.items())
    return " ".join(told) or "replayed as it was"


def _json(run: Path, found: Mapping[str, Replayed]) -> str:
    told = [{"settings": label, **replayed.to_dict()} for label, replayed in found.items()]
    return json.dumps({"run": str(run), "caution": CAUTION, "replays": told}, indent=2) + "\n"


def _csv(found: Mapping[str, Replayed]) -> str:
    text = io.StringIO()
    table = csv.writer(text)
    factors = [f"{what}_{part}" for what in ("recorded", "replayed") for part in _NUMBERS]
    ends = ("groups", "at_lower_bound", "at_upper_bound", "difference", "where")
    table.writerow(["settings", "round", *factors, *ends])
    for label, replayed in found.items():
        for one in replayed.rounds:
            spreads = [getattr(s, part) for s in (one.recorded, one.replayed) for part in _NUMBERS]
            counts = (len(one.groups), len(one.low), len(one.high))
            table.writerow([label, one.round, *spreads, *counts, one.difference, one.where])
    return text.getvalue()


_NUMBERS = ("least", "mean", "most")


# ------------------------------------------------------------------------------------- terminal


def _show(run: Path, record: Recording, found: Mapping[str, Replayed], *, every: bool) -> None:
    first = next(iter(found.values()))
    skipped = f", {record.skipped} skipped" if record.skipped else ""
    console.print(
        escape(f"{run}: {len(record.lines)} rounds that stepped{skipped}; {_own(record)}"),
        soft_wrap=True,
    )
    _check(record)
    console.print()
    table = _table("", "mean", "std", "least", "most", "slowed", "sped up", "at low", "at high")
    table.add_row("recorded", *_cells(first.recorded))
    for label, replayed in found.items():
        table.add_row(escape(_short(label)), *_cells(replayed.replayed))
    _print_wide(table)
    for label, replayed in found.items():
        own = f" with {_short(label)}" if len(found) > 1 else ""
        console.print(escape(f"Largest difference{own}: {_largest(replayed)}."), soft_wrap=True)
    console.print(
        "mean, std: of the rounds' mean factors over the groups; slowed, sped up: rounds in which "
        "it is below or above 1; at low, at high: the share of factors that are a bound.\n"
        + CAUTION,
        soft_wrap=True,
    )
    for label, replayed in found.items():
        if every or len(found) == 1:
            _show_rounds(label, replayed, every=every)
    for note in dict.fromkeys(note for replayed in found.values() for note in replayed.notes):
        console.print(escape(f"Note: {note}."), soft_wrap=True)


def _short(label: str) -> str:
    """In a table all keys are of the same section."""
    return label.replace("adapter.", "")


def _own(record: Recording) -> str:
    own = own_rule(record.config)
    if own is None:
        return "its own rule is not known here"
    return " ".join(f"{k}={v}" for k, v in settings(own).items())


def _check(record: Recording) -> None:
    """Says whether the run's own rule gives the recorded factors, which it should."""
    own = own_rule(record.config)
    try:
        if own is None:
            return
        require_replayable(own)
        found = replay(record, own)
    except ReplayError as reason:
        console.print(escape(f"The record was not checked: {reason}."), soft_wrap=True)
        return
    if found.exact:
        console.print("Checked: its own settings give exactly the recorded factors.")
        return
    wrong = [one for one in found.rounds if not one.same]
    most = f"; by {abs(found.largest.difference or 0):.2g} at most" if found.largest else ""
    warn(
        f"its own settings do not give the recorded factors in {len(wrong)} of "
        f"{len(found.rounds)} rounds, first in round {wrong[0].round + 1}{most}: the number of "
        "clients changed, or another version or type of machine made the record"
    )


def _show_rounds(label: str, replayed: Replayed, *, every: bool) -> None:
    different = [one for one in replayed.rounds if one.difference]
    if not (different or every):
        return
    rounds = list(replayed.rounds)
    if not every:
        rounds = sorted(different, key=lambda one: -abs(one.difference or 0))[:SHOWN]
    what = "All rounds" if every else "Rounds that differ most"
    console.print(f"\n{what}, factors: least, mean, most.  {escape(_short(label))}", soft_wrap=True)
    table = _table("round", "recorded", "replayed", "at low", "at high")
    table.add_column("largest difference", overflow="fold")
    for one in rounds:
        table.add_row(str(one.round + 1), *_round_cells(one))
    _print_wide(table)


def _round_cells(one: ReplayedRound) -> list[str]:
    bound = [f"{len(at)}/{len(one.groups)}" if at else "" for at in (one.low, one.high)]
    return [_three(one.recorded), _three(one.replayed), *bound, escape(_difference(one))]


def _cells(found: Summary) -> list[str]:
    shares = ["-" if x is None else f"{100 * x:.0f} %" for x in (found.low, found.high)]
    numbers = [_number(x) for x in (found.mean, found.deviation, found.least, found.most)]
    return [*numbers, str(found.slowed), str(found.sped), *shares]


def _largest(replayed: Replayed) -> str:
    one = replayed.largest
    if one is None:
        return "none" if replayed.rounds[0].difference is not None else "not known"
    return f"{_difference(one)}, round {one.round + 1}"


def _difference(one: ReplayedRound) -> str:
    if not one.difference:
        return "" if one.difference is None else "none"
    sign = "+" if one.difference > 0 else "-"
    return f"{sign}{_number(abs(one.difference))} {one.where}"


def _three(spread: Spread) -> str:
    return " ".join(_number(getattr(spread, part)) for part in _NUMBERS)


def _number(value: float) -> str:
    """Three decimals, as far as a factor has them."""
    return f"{value:.3f}" if value == 0 or 5e-4 <= value < 100 else f"{value:.3g}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, overflow="fold")
    for head in others:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _print_wide(table: Table) -> None:
    wide = console if console.is_terminal else Console(highlight=False, width=WIDE)
    wide.print(table)
