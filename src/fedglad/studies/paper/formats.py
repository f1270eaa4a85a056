"""A table as Markdown, CSV or LaTeX; the terminal's is in the command line."""

import csv
import io
import json
from collections.abc import Callable

from fedglad.analysis.tables import escaped
from fedglad.studies.paper.tables import Table


def markdown(table: Table) -> str:
    """A pipe table under its title, with the notes as a list."""
    heads = [column.head for column in table.columns]
    rules = [":--" if column.left else "--:" for column in table.columns]
    lines = [_pipes(heads), _pipes(rules), *map(_pipes, table.texts())]
    notes = "".join(f"\n- {note}" for note in table.notes)
    return f"{table.title}\n\n" + "\n".join(lines) + "\n" + (f"{notes}\n" if notes else "")


def as_csv(table: Table) -> str:
    """Every number in a column of its own, as it is; what belongs to seeds as JSON."""
    names = list(dict.fromkeys(name for row in table.rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        nested = {name: json.dumps(v) for name, v in row.items() if isinstance(v, dict | list)}
        writer.writerow({**row, **nested})
    return out.getvalue()


def latex(table: Table) -> str:
    """A tabular of booktabs; the notes are comments."""
    kinds = "".join("l" if column.left else "r" for column in table.columns)
    lines = [
        f"% {table.title}",
        *(f"% {note}" for note in table.notes),
        rf"\begin{{tabular}}{{{kinds}}}",
        r"\toprule",
        _ampersands([column.head for column in table.columns]),
        r"\midrule",
        *map(_ampersands, table.texts()),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


FORMATS: dict[str, Callable[[Table], str]] = {"markdown": markdown, "csv": as_csv, "latex": latex}


def _pipes(texts: list[str]) -> str:
    escaped = (text.replace("|", r"\|") for text in texts)
    return f"| {' | '.join(escaped)} |"


def _ampersands(texts: list[str]) -> str:
    return " & ".join(map(escaped, texts)) + r" \\"


SHOWN = ("terminal", *FORMATS)
