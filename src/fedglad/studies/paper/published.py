"""The numbers of the paper's tables, as they stand in paper.toml."""

from collections.abc import Mapping
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

    Keys are (method, with FedGLAD, …columns), with the data set first where rows belong to one.
    """

    number: int
    label: str
    values: Mapping[Key, Value]

    def of(self, *key: str | float | bool) -> Value:
        """One value."""
        return self.values[key]


def _table(name: str) -> Published:
    table, values = PAPER["tables"][name], dict[Key, Value]()
    for row, numbers in table["rows"].items():
        before: Key = ()
        for word in row.split():
            before += (word,) if word in DATA else (word.rstrip("+"), word.endswith("+"))
        for column, number in zip(table["columns"], numbers.split(), strict=True):
            values[(*before, *column)] = Value(*map(float, number.split("±")))
    return Published(table["number"], table["label"], values)


MAIN = {0.1: _table("main"), 1.0: _table("main-alpha1")}
"""By α; keys (method, with FedGLAD, data set)."""

RATIOS = _table("ratios")
"""Keys (data set, method, with FedGLAD, clients a round)."""

STRATEGIES = _table("strategies")
"""Keys (data set, method, with FedGLAD, sampler)."""

NORM_RATIO = _table("norm-ratio")
"""Keys (data set, α, local epochs): std/mean of squared norms, mean over the rounds."""

CENTRALISED = _table("centralised")
"""Keys (data set,)."""

SCAFFOLD = _table("scaffold")
"""Keys (method, with FedGLAD, data set, α)."""

BILSTM = _table("bilstm")
"""Keys (method, with FedGLAD, data set)."""

EPOCHS = _table("epochs")
"""Keys (method, with FedGLAD, data set, local epochs)."""

SEEDS = {0.1: _table("seeds"), 1.0: _table("seeds-alpha1")}
"""By α; keys (data set, method, with FedGLAD, seed), counted as the paper does."""

SIMILARITY = Value(0.4753)
"""Pearson's r of GSI and label similarity over the rounds of CIFAR-10, in the text."""
