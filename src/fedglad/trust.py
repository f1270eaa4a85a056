"""The rule that flags a round: how far GSI is from its own history. It needs no labels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fedglad.core.checks import check


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Flags a round by q = GSI/B over all parameters, B the running mean of GSI before it.

    | flag | rule | it means |
    |---|---|---|
    | `one-sided` | q < `low` | the updates agree more than usual: the cohort may be all alike |
    | `outlier` | q > `high` | they disagree more: some are unlike the others, or all are mixed |

    B ← β B + (1 − β) GSI with bias correction, over the rounds that stepped; the first `warmup` of
    them are not judged.

    The defaults were chosen on runs with forced bad rounds; how many of others they find, and how
    many alarms are false, is in docs/trust.md.

    >>> alarm, state = Alarm(warmup=1), {}
    >>> for gsi in (2.0, 2.1, 1.2):
    ...     flag, state = alarm.judge(gsi, state)
    >>> flag  # 1.2 is less than 0.75 of what was usual
    'one-sided'
    """

    low: Annotated[float, "GSI/B below which a round is one-sided"] = 0.75
    high: Annotated[float, "GSI/B above which a round has outliers"] = 1.45
    beta: Annotated[float, "how much of the history stays from round to round"] = 0.9
    warmup: Annotated[int, "rounds that are not judged"] = 5

    def __post_init__(self) -> None:
        if not 0 < self.low < 1 < self.high:
            raise ValueError(
                f"Alarm(low={self.low!r}, high={self.high!r}): low must be in (0, 1), high above 1"
            )
        check(self, beta=(0 <= self.beta < 1, "in [0, 1)"))
        if self.warmup < 1:
            raise ValueError(
                f"Alarm(warmup={self.warmup!r}): there must be a round to compare with"
            )

    def usual(self, state: Mapping[str, Any]) -> float | None:
        """B, which the next round's GSI will be compared with; None during the warm-up."""
        seen = int(state.get("seen", 0))
        return float(state["mean"]) / (1 - self.beta**seen) if seen >= self.warmup else None

    def judge(
        self, gsi: float | None, state: Mapping[str, Any]
    ) -> tuple[str | None, dict[str, Any]]:
        """The flag of a round, None for a usual one, and the state after it; {} at first.

        A round that was skipped has no GSI and changes nothing, nor does one whose GSI is no
        number.
        """
        if gsi is None or not math.isfinite(gsi):
            return None, dict(state)
        usual, flag = self.usual(state), None
        if usual is not None:
            flag = "one-sided" if gsi < self.low * usual else None
            flag = "outlier" if gsi > self.high * usual else flag
        seen, mean = int(state.get("seen", 0)), float(state.get("mean", 0.0))
        return flag, {"seen": seen + 1, "mean": self.beta * mean + (1 - self.beta) * gsi}
