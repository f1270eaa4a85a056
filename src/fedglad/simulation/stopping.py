"""When a run ends before its last round, decided from its records alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedglad.records import ACCURACY, Round, Score

MODELS = ("validation", "averaged_validation")
"""Which scores count: those of θ, and of the average where it is tested."""


@dataclass
class Stopping:
    """Looks at one round after the other, and says when the run is to stop.

    | setting | meaning |
    |---|---|
    | `after` | tested rounds without a better validation score; 0: any number |
    | `seconds` | that all rounds may take together; 0: any number |

    With an average that is tested, a better score of θ or of the average is one.

    >>> stopping = Stopping(after=2)
    >>> for t, accuracy in enumerate([0.5, 0.75, 0.75, 0.5]):
    ...     stopping.look({"round": t, "validation_accuracy": accuracy})
    >>> stopping.reason
    'no better validation score for 2 tested rounds (best: round 2)'
    """

    after: int = 0
    seconds: float = 0.0
    spent: float = 0.0
    best: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    waited: int = 0
    asked: str = ""  # why a callback ends the run

    def look(self, record: Mapping[str, Any]) -> None:
        """Takes the next round's record."""
        self.spent += math.fsum(record.get("seconds", {}).values())
        self.judge(record["round"], _scores(record), _score(record))

    def look_at(self, played: Round) -> None:
        """The same of a round that was just played."""
        self.spent += math.fsum(played.seconds.values())
        self.judge(played.t, _scored(played), played.score)

    def judge(self, t: int, scores: Mapping[str, float], score: Score) -> None:
        """Takes the validation scores of a round; none of a round that was not tested."""
        if not scores:
            return
        self.waited += 1
        for which, value in scores.items():
            before = self.best.get(which)
            if math.isfinite(value) and (before is None or score.better(value, before[1])):
                self.best[which] = t, value
                self.waited = 0

    def late(self, seconds: float = 0.0) -> bool:
        """Whether the time is over, so many seconds after the last record."""
        return bool(self.seconds) and self.spent + seconds >= self.seconds

    def ends(self, played: Round) -> bool:
        """Whether this round is the last by its validation scores."""
        trial = replace(self, seconds=0.0, best=dict(self.best))
        trial.look_at(played)
        return bool(trial.reason)

    @property
    def reason(self) -> str:
        """Why the run has ended, after the last round that was looked at; empty if it has not."""
        if self.asked:
            return self.asked
        if self.after and self.waited >= self.after:
            rounds = [self.best[which][0] + 1 for which in MODELS if which in self.best]
            best = f"round {rounds[0]}" if rounds else "none is a number"
            average = f", of the average: round {rounds[1]}" if len(rounds) > 1 else ""
            many = f"{self.after} tested round{'s' if self.after > 1 else ''}"
            return f"no better validation score for {many} (best: {best}{average})"
        return "max_seconds" if self.late() else ""


def _score(record: Mapping[str, Any]) -> Score:
    given = record.get("score")
    return Score(**given) if given else ACCURACY


def _scores(record: Mapping[str, Any]) -> dict[str, float]:
    """The validation scores of a record; NaN for one that was measured and is no number."""
    name = _score(record).name
    measured = {which: f"{which}_{name}" for which in MODELS if f"{which}_{name}" in record}
    found = {which: record[key] for which, key in measured.items()}
    return {which: math.nan if value is None else value for which, value in found.items()}


def _scored(played: Round) -> dict[str, float]:
    found = {which: played.scored(which) for which in MODELS}
    return {which: value for which, value in found.items() if value is not None}
