"""The rules of a problem beside each other, raw and averaged, with paired intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from fedglad.analysis.statistics import interval, paired_p, spread, stability
from fedglad.records import Score
from fedglad.studies.paper.tables import Column, Row, Table, column
from fedglad.studies.participation.cells import NONE, Cell
from fedglad.studies.participation.results import READOUTS, Draw, kept

SURE = 0.05  # that some rule of a column is called better or worse though it is not


def tables(chosen: Sequence[Cell], folder: Path) -> list[Table]:
    """One for each problem and kind of participation of which anything is there."""
    made: list[Table] = []
    blocks: dict[tuple[str, str], list[Cell]] = {}
    for cell in chosen:
        blocks.setdefault((cell.problem.name, cell.participation.name), []).append(cell)
    for block in blocks.values():
        draws = {cell.rule.name: kept(cell, folder) for cell in block}
        if any(draws.values()):
            made.append(_table(block[0], draws))
    return made


def _table(first: Cell, draws: Mapping[str, Mapping[int, Draw]]) -> Table:
    problem, participation, score = first.problem, first.participation, first.score
    rows = [_row(name, there, draws.get(NONE, {}), score) for name, there in draws.items()]
    for readout in READOUTS:
        _judge(rows, readout, score)
    lacking = [row["label"] for row in rows if not row["n"]]
    notes = [
        "differences are paired by draw, rule − none of the same read-out, with Student's 95 % "
        "interval; ▲ better, ▼ worse at 5 % for all rules of the column together (Holm)"
    ]
    notes += [f"not run: {', '.join(lacking)}"] if lacking else []
    title = f"{problem.name}, {participation.name}: {problem.about}; {participation.about}"
    shown = [row for row in rows if row["n"]]
    return Table("participation", title, _columns(score), shown, notes)


def _row(name: str, draws: Mapping[int, Draw], none: Mapping[int, Draw], score: Score) -> Row:
    unit = score.unit
    row: Row = {"label": name, "n": len(draws), "seconds": None}
    if draws:
        row["seconds"] = fmean(one.seconds for one in draws.values())
    for readout in READOUTS:
        values = {draw: unit * one.last10(readout) for draw, one in draws.items()}
        base = {draw: unit * one.last10(readout) for draw, one in none.items()}
        pairs = [values[d] - base[d] for d in values if d in base and name != NONE]
        bounds = interval(pairs)
        tested = [[unit * x for x in getattr(one, readout)] for one in draws.values()]
        steady = stability(tested, higher=score.higher)
        row |= {
            readout: fmean(values.values()) if values else None,
            f"{readout}_draws": values,
            f"{readout}_std": spread([*values.values()]),
            f"{readout}_difference": fmean(pairs) if pairs else None,
            f"{readout}_interval": list(bounds) if bounds else None,
            f"{readout}_p": paired_p(pairs),
            f"{readout}_spread": steady and steady.std,
            f"{readout}_worst": steady and steady.worst,
        }
    gains = [unit * one.last10("averaged") - unit * one.last10("raw") for one in draws.values()]
    bounds = interval(gains)
    row |= {"gain": fmean(gains) if gains else None, "gain_interval": bounds and list(bounds)}
    return row


def _judge(rows: Sequence[Row], readout: str, score: Score) -> None:
    """Marks what differs from none for sure: Holm's step-down over the rules of a column."""
    known = sorted(
        (row for row in rows if row[f"{readout}_p"] is not None),
        key=lambda row: row[f"{readout}_p"],
    )
    for row in rows:
        row[f"{readout}_sure"] = ""
    for k, row in enumerate(known):
        if row[f"{readout}_p"] > SURE / (len(known) - k):
            break
        row[f"{readout}_sure"] = "▲" if score.sign * row[f"{readout}_difference"] > 0 else "▼"


def _difference(readout: str) -> Column:
    number = column("", f"{readout}_difference", "{:+.2f}").text
    bounds = column("", f"{readout}_interval", "{:+.2f}").text

    def text(row: Row) -> str:
        if row[f"{readout}_difference"] is None:
            return "-"
        return f"{number(row)} {bounds(row)} {row[f'{readout}_sure']}".rstrip()

    return Column(f"{readout} − none", text)


def _columns(score: Score) -> list[Column]:
    unit = " %" if score.share else ""
    return [
        Column("rule", lambda row: row["label"], left=True),
        column("draws", "n", "{:d}"),
        column(f"raw{unit}", "raw", std="raw_std"),
        _difference("raw"),
        column(f"averaged{unit}", "averaged", std="averaged_std"),
        _difference("averaged"),
        column("averaged − raw", "gain", "{:+.2f}"),
        column("worst raw", "raw_worst", "{:.1f}"),
        column("worst averaged", "averaged_worst", "{:.1f}"),
        column("seconds", "seconds", "{:.0f}"),
    ]
