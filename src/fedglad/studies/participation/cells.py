"""The cells of the study: a problem, a kind of participation and a rule."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from fedglad.config.schema import Config, ConfigError, load
from fedglad.records import Score
from fedglad.tasks.base import score_of

NONE = "none"  # the rule that all others are compared with
STUDY = Path(__file__).with_name("study.toml")


class StudyError(ValueError):
    """What cannot be run, shown or read; the message says what to do."""


@dataclass(frozen=True)
class Part:
    """A problem, a kind of participation or a rule: its name and the keys that it sets."""

    name: str
    about: str = ""
    set: Mapping[str, Any] = field(default_factory=dict[str, Any])
    preset: str = ""  # of a problem
    draws: int = 0  # of a problem: how many are planned


@dataclass(frozen=True)
class Cell:
    """One configuration, repeated over draws of clients, cohorts and batches."""

    problem: Part
    participation: Part
    rule: Part
    common: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """As its file is called.

        >>> cells(["digits-cnn uniform-10 glad"])[0].name
        'digits-cnn.uniform-10.glad'
        """
        return ".".join(part.name for part in self.parts)

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        return self.problem, self.participation, self.rule

    @property
    def score(self) -> Score:
        """What its runs are judged by."""
        return score_of(self.config(1).sections["task"])

    def config(self, draw: int) -> Config:
        """The run of a draw.

        >>> config = cells(["digits-cnn uniform-10 glad"])[0].config(draw=3)
        >>> config.seed, config.sections["data"].seed, config.sections["sampler"].seed
        (3, 3, 'run')
        """
        keys = dict(self.common)
        for part in self.parts:
            keys |= part.set
        if "adapter.name" not in keys:
            keys["adapter.name"] = NONE
        try:
            return load(self.problem.preset, {**keys, "seed": draw, "data.seed": draw})[1]
        except ConfigError as error:
            raise StudyError(f"{self.name}: {error}") from None


@cache
def study() -> Mapping[str, Mapping[str, Part]]:
    """The parts by kind and name; `study` has what all cells share."""
    tree = tomllib.loads(STUDY.read_text("utf-8"))
    shared = tree.pop("study")
    shared["set"] = {**shared["set"], "average.name": shared.pop("average")}
    kinds = {
        kind: {n: Part(n, **keys) for n, keys in parts.items()} for kind, parts in tree.items()
    }
    return {**kinds, "study": {"study": Part("study", **shared)}}


def cells(only: Sequence[str] = ()) -> list[Cell]:
    """All cells, or those that have all words of one of the texts among the names of their parts.

    >>> [cell.name for cell in cells(["synthetic cyclic pooled", "mnist-cnn markov none"])]
    ['synthetic.cyclic.pooled', 'mnist-cnn.markov.none']
    """
    kinds = study()
    problems, kinds_of, rules = (kinds[k].values() for k in ("problems", "participation", "rules"))
    common = kinds["study"]["study"].set
    every = [Cell(*parts, common) for parts in product(problems, kinds_of, rules)]
    if not only:
        return every
    known = {name for kind, named in kinds.items() if kind != "study" for name in named}
    for word in " ".join(only).split():
        if word not in known:
            close = difflib.get_close_matches(word, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"one of {', '.join(sorted(known))}"
            raise StudyError(f"--only {word!r}: no part of the study has that name: {hint}")
    wanted = [set(text.split()) for text in only]
    return [c for c in every if any(words <= {p.name for p in c.parts} for words in wanted)]
