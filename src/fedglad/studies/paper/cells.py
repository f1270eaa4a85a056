"""A cell of a table: what is run, with which seeds, and what the paper has there."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from fedglad.config.presets import PRESETS
from fedglad.config.schema import REGISTRIES, Config, ConfigError, load
from fedglad.studies.paper import settings
from fedglad.studies.paper.settings import DATA, METHODS, TABLES, Value

ABSENT = "data set not in this version"

Reading = Literal[
    "accuracy", "seeds", "gamma", "bad-round", "gsi-groups", "norm-ratio", "similarity"
]


class PaperError(ValueError):
    """What cannot be run, shown or read; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration, repeated with some seeds."""

    label: str
    data: str  # the paper's data set
    preset: str
    overrides: Mapping[str, Any]
    seeds: tuple[int, ...] = settings.SEEDS
    baseline: str | None = None  # the cell from which its difference is taken, seed by seed
    published: Value | None = None
    by_seed: tuple[float, ...] = ()  # published, too
    ours: str = ""  # what in it the paper does not publish
    x: float | None = None  # its place on the axis of a plot

    @property
    def absent(self) -> str:
        """Why it cannot be run in this version; empty if it can."""
        if self.preset not in PRESETS:
            return ABSENT
        for key, value in self.overrides.items():
            section, _, rest = key.partition(".")
            imported = ":" in str(value)  # package.module:Object
            if rest == "name" and not imported and value not in REGISTRIES[section]:
                return f"{section} {value!r} not in this version"
        return ""

    @property
    def rounds(self) -> int:
        """Of the whole run, as in the paper."""
        return int(self.overrides.get("rounds", DATA[self.data].rounds))

    def config(self, seed: int, rounds: int | None = None) -> Config:
        """The configuration with this seed, shortened to `rounds` if these are fewer."""
        length = min(rounds or self.rounds, self.rounds)
        return replace(self._whole, seed=seed, rounds=length)

    @cached_property
    def _whole(self) -> Config:
        """Checked once: it takes some milliseconds."""
        try:
            return load(self.preset, {**self.overrides, "rounds": self.rounds})[1]
        except ConfigError as error:
            raise PaperError(f"{self.label}: {error}") from None

    def matches(self, text: str) -> bool:
        """Whether the text has only words of its label or its data set: "cifar10 fedavg"."""
        words = _words(text)
        return bool(words) and {self.data, *_words(self.label)}.issuperset(words)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure of the paper: its cells, and how they are read."""

    name: str
    about: str
    where: str
    cells: tuple[Cell, ...]
    reading: Reading = "accuracy"
    least_rounds: int = 1
    notes: Sequence[str] = ()

    def cell(self, label: str) -> Cell:
        """The cell with this label."""
        return next(cell for cell in self.cells if cell.label == label)

    def chosen(self, only: Sequence[str] = ()) -> list[Cell]:
        """The cells with one of the labels, or with all words of one of the texts; else all."""
        if not only:
            return list(self.cells)
        labels = set[str]()
        for text in only:
            exact = [cell for cell in self.cells if cell.label == text]
            matching = exact or [cell for cell in self.cells if cell.matches(text)]
            if not matching:
                every = "; ".join(cell.label for cell in self.cells)
                raise PaperError(f"--only {text!r} matches no cell of {self.name}: {every}")
            labels.update(cell.label for cell in matching)
        return [cell for cell in self.cells if cell.label in labels]


def cell(
    data: str,
    method: str,
    glad: bool,
    *,
    alpha: float = 0.1,
    table: str = "",
    column: Sequence[str | float] = (),
    detail: str = "",
    extra: Mapping[str, Any] | None = None,
    **others: Any,
) -> Cell:
    """A method on a data set with the settings of the paper's appendix; `extra` goes on top.

    Its published value stands in this column of the `table`.
    """
    overrides: dict[str, Any] = {
        "data.alpha": alpha,
        **METHODS[method],
        "server.lr": settings.SERVER_LR[method][data][alpha],
        "adapter.name": "glad" if glad else "none",
    }
    if method == "FedProx":
        overrides["client.mu"] = settings.MU[data][alpha]
    if glad:
        overrides |= {"adapter.gamma": settings.GAMMA, "adapter.beta": settings.BETA}
    plain = named(data, method, detail)
    return Cell(
        label=named(data, f"{method} + FedGLAD", detail) if glad else plain,
        data=data,
        preset=data,
        overrides={**overrides, **(extra or {})},
        published=TABLES[table][data, method, glad, *column] if table else None,
        baseline=plain if glad else None,
        **others,
    )


def named(data: str, method: str, detail: str = "") -> str:
    """The label of the cell without FedGLAD."""
    return f"{DATA[data].title} {method}{f', {detail}' if detail else ''}"


def _words(text: str) -> list[str]:
    return re.findall(r"[\w.∞=-]+", text.lower())
