"""The numbers of the paper's tables, as they stand in paper.toml."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedglad.studies.paper.settings import DATA, PAPER

Key = tuple[str | float | bool, ...]


@dataclass(frozen=True)
class Value:
    """A published mean, with its deviation where there is one."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Published:
    """A table: its number, its label in the LaTeX source, and its values.

    Keys are (data set, method, with FedGLAD, …what else its columns are), without the method where
    there is none.
    """

    number: int
    label: str
    values: Mapping[Key, Value]

    def of(self, *key: str | float | bool) -> Value:
        """One value."""
        return self.values[key]


def _table(
    number: int, label: str, columns: Sequence[Sequence[str | float]], rows: Mapping[str, str]
) -> Published:
    values = dict[Key, Value]()
    for row, numbers in rows.items():
        before: Key = ()
        for word in row.split():
            before += (word,) if word in DATA else (word.rstrip("+"), word.endswith("+"))
        for column, text in zip(columns, numbers.split(), strict=True):
            key = sorted((*before, *column), key=lambda part: part not in DATA)  # the data first
            values[tuple(key)] = Value(*map(float, text.split("±")))
    return Published(number, label, values)


TABLES = {name: _table(**table) for name, table in PAPER["tables"].items()}
"""By their names in paper.toml, which says what the columns are."""

SIMILARITY = Value(0.4753)
"""Pearson's r of GSI and label similarity over the rounds of CIFAR-10, in the text."""
