"""`fedglad replay`: what other settings would have done to the factors of a recorded run."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedglad.cli.console import console, escape, mistakes, note, print_wide, say, table, warn
from fedglad.cli.options import AsJson, Settings, given

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedglad.adapters import Adapter
    from fedglad.analysis.recording import Recording
    from fedglad.analysis.replaying import Replayed, ReplayedRound, Summary

app = typer.Typer()

SHOWN = 10  # rounds, unless all are asked for
_NUMBERS = ("least", "mean", "most")  # of a `Spread`

CAUTION = (
    "These are the factors for these same rounds, not a forecast: with other factors the model "
    "would have moved elsewhere, and later updates would have been others."
)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    set_: Settings = None,
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
    as_json: AsJson = False,
) -> None:
    """Show what other settings, groupings or rules would have done to a run's factors."""
    from fedglad.analysis.recording import read
    from fedglad.config.schema import ConfigError
    from fedglad.runs.sweeping import combinations

    with mistakes():
        if out and out.suffix not in (".csv", ".json"):
            raise ConfigError(f"--out {out}: choose a name that ends in .csv or .json")
        record, fixed = read(run, population=population), given(set_, "adapter.gamma=0.05")
        every_settings = [{**fixed, **chosen} for chosen in combinations(grid or [], fixed)]
        replays = {_label(settings): _replayed(record, settings) for settings in every_settings}
        if out:
            text = _csv(replays) if out.suffix == ".csv" else _json(run, replays)
            try:
                out.write_text(text, "utf-8", newline="")
            except OSError as mistake:
                raise OSError(
                    f"{out} cannot be written: {mistake.strerror}; choose another --out"
                ) from None
    if as_json:
        sys.stdout.write(_json(run, replays))
        return
    _show(run, record, replays, every=every)
    if out:
        say(f"Written: {out}")


def _replayed(record: Recording, settings: Mapping[str, Any]) -> Replayed:
    from fedglad.analysis.recording import ReplayError
    from fedglad.analysis.replaying import replay, rule
    from fedglad.config.schema import ConfigError

    try:
        return replay(record, rule(record.config, settings))
    except (ReplayError, ConfigError) as mistake:
        which = f"  (with {_label(settings)})" if len(settings) > 1 else ""
        raise ReplayError(f"{mistake}{which}") from None


def _label(settings: Mapping[str, Any]) -> str:
    from fedglad.config.keys import shown

    pairs = (f"{k}={v if isinstance(v, float) else shown(v)}" for k, v in settings.items())
    return " ".join(pairs) or "replayed as it was"


def _json(run: Path, replays: Mapping[str, Replayed]) -> str:
    rows = [{"settings": label, **replayed.to_dict()} for label, replayed in replays.items()]
    return json.dumps({"run": str(run), "caution": CAUTION, "replays": rows}, indent=2) + "\n"


def _csv(replays: Mapping[str, Replayed]) -> str:
    text = io.StringIO()
    lines = csv.writer(text)
    factors = [f"{what}_{part}" for what in ("recorded", "replayed") for part in _NUMBERS]
    ends = ("groups", "at_lower_bound", "at_upper_bound", "difference", "where")
    lines.writerow(["settings", "round", *factors, *ends])
    for label, replayed in replays.items():
        for one in replayed.rounds:
            spreads = [getattr(s, part) for s in (one.recorded, one.replayed) for part in _NUMBERS]
            counts = (len(one.groups), len(one.low), len(one.high))
            lines.writerow([label, one.round, *spreads, *counts, one.difference, one.where])
    return text.getvalue()


# ------------------------------------------------------------------------------------- terminal


def _show(run: Path, record: Recording, replays: Mapping[str, Replayed], *, every: bool) -> None:
    from fedglad.analysis.replaying import own_rule, settings

    # In a table all keys are of the same section.
    replays = {label.replace("adapter.", ""): replayed for label, replayed in replays.items()}
    recorded_rule = own_rule(record.config, [one.adapter for one in replays.values()])
    rule = "its own rule is not known here"
    if recorded_rule is not None:
        rule = " ".join(f"{k}={v}" for k, v in settings(recorded_rule).items())
    skipped = f", {record.skipped} skipped" if record.skipped else ""
    say(f"{run}: {len(record.lines)} rounds that stepped{skipped}; {rule}")
    if recorded_rule is not None:
        _check(record, recorded_rule)
    console.print()
    made = table("", "mean", "std", "least", "most", "slowed", "sped up", "at low", "at high")
    made.add_row("recorded", *_cells(next(iter(replays.values())).recorded))
    for label, replayed in replays.items():
        made.add_row(escape(label), *_cells(replayed.replayed))
    print_wide(made)
    for label, replayed in replays.items():
        which = f" with {label}" if len(replays) > 1 else ""
        say(f"Largest difference{which}: {_largest(replayed)}.")
    say(
        "mean, std: of the rounds' mean factors over the groups; slowed, sped up: rounds in which "
        "it is below or above 1; at low, at high: the share of factors that are a bound.\n"
        + CAUTION
    )
    for label, replayed in replays.items():
        if every or len(replays) == 1:
            _show_rounds(label, replayed, every=every)
    note(dict.fromkeys(text for replayed in replays.values() for text in replayed.notes))


def _check(record: Recording, rule: Adapter) -> None:
    """Reports whether the run's own rule gives the recorded factors, which it should."""
    from fedglad.analysis.recording import ReplayError
    from fedglad.analysis.replaying import replay

    try:
        again = replay(record, rule)
    except ReplayError as reason:
        say(f"The record was not checked: {reason}.")
        return
    if again.exact:
        console.print("Checked: its own settings give exactly the recorded factors.")
        return
    wrong = [one for one in again.rounds if not one.same]
    most = f"; by {abs(again.largest.difference or 0):.2g} at most" if again.largest else ""
    warn(
        f"its own settings do not give the recorded factors in {len(wrong)} of "
        f"{len(again.rounds)} rounds, first in round {wrong[0].round + 1}{most}: the number of "
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
    console.print(f"\n{what}, factors: least, mean, most.  {escape(label)}", soft_wrap=True)
    made = table("round", "recorded", "replayed", "at low", "at high")
    made.add_column("largest difference", overflow="fold")
    for one in rounds:
        spreads = (one.recorded, one.replayed)
        three = [" ".join(_number(getattr(s, part)) for part in _NUMBERS) for s in spreads]
        bounds = [f"{len(at)}/{len(one.groups)}" if at else "" for at in (one.low, one.high)]
        made.add_row(str(one.round + 1), *three, *bounds, escape(_difference(one)))
    print_wide(made)


def _cells(over: Summary) -> list[str]:
    shares = ["-" if x is None else f"{100 * x:.0f} %" for x in (over.low, over.high)]
    numbers = [_number(x) for x in (over.mean, over.deviation, over.least, over.most)]
    return [*numbers, str(over.slowed), str(over.sped), *shares]


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


def _number(value: float) -> str:
    """Three decimals, as far as a factor has them."""
    return f"{value:.3f}" if value == 0 or 5e-4 <= value < 100 else f"{value:.3g}"
