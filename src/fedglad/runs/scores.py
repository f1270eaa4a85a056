"""A run's metrics by name: the fields of its records, the numbers of its summary, its score."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedglad.records import ACCURACY, READOUTS, Score

_READOUT = "|".join(sorted(READOUTS, key=len, reverse=True))
FIELD = re.compile(rf"({_READOUT})_(?!client_scores\b)([a-z0-9_]{{1,40}})")
"""A metric in a record: that of which model and samples, and its name; not the clients' scores."""
_NUMBER = re.compile(rf"(last10|final|best)_(?:({_READOUT})_)?([a-z0-9_]{{1,40}})")
_AVERAGED = {"test": "averaged", "validation": "averaged_validation"}


@dataclass(frozen=True)
class Number:
    """A number of summary.json: when, of which model and samples (READOUTS), of which metric.

    >>> Number("last10", "test", "accuracy").name, Number("final", "validation", "mae").name
    ('last10_accuracy', 'final_validation_mae')
    >>> Number.named("last10_averaged_f1")
    Number(when='last10', readout='averaged', metric='f1')
    """

    when: str
    readout: str
    metric: str

    @property
    def name(self) -> str:
        """As summary.json has it; the test set is not named there."""
        return "_".join(p for p in (self.when, self.readout, self.metric) if p != "test")

    @property
    def field(self) -> str:
        """The field of a record that it is made of."""
        return f"{self.readout}_{self.metric}"

    @property
    def averaged(self) -> "Number | None":
        """The same of the average of a run's models; None if it is of that."""
        other = _AVERAGED.get(self.readout)
        return (other and replace(self, readout=other)) or None

    @classmethod
    def named(cls, name: str) -> "Number | None":
        """By its name; None for what is no metric's, such as seconds."""
        found = _NUMBER.fullmatch(name)
        if not found or found[3] == "round":
            return None
        return cls(found[1], found[2] or "test", found[3])


def score_of(
    rounds: Iterable[Mapping[str, Any]], summary: Mapping[str, Any] | None = None
) -> Score:
    """What the records name as the score, or a summary without records; accuracy if nothing does.

    >>> score_of([{"round": 0, "score": {"name": "mae", "higher": False}}])
    Score(name='mae', higher=False)
    """
    found = (Score.read(one["score"]) for one in (*rounds, summary or {}) if "score" in one)
    return next(filter(None, found), ACCURACY)


def metrics_in(rounds: Iterable[Mapping[str, Any]], score: Score) -> list[str]:
    """The metrics that records have, the score first; of classification the loss is none of them.

    >>> record = {"test_loss": 0.5, "test_accuracy": None, "test_mae": 2.0}
    >>> metrics_in([record], Score("mae", higher=False))
    ['mae', 'loss']
    """
    left_out = {"loss"} if score == ACCURACY else set[str]()
    fields = {field: None for one in rounds for field, value in one.items() if value is not None}
    named = (found for field in fields if (found := FIELD.fullmatch(field)))
    others = {found[2]: None for found in named if found[1] == "test"}
    return [score.name, *(name for name in others if name not in {score.name, *left_out})]
