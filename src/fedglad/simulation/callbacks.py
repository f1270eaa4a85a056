"""What a user wants to be called with after every round, and how it ends the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fedglad.records import Round

Answer = Any
"""True or a text ends the run, None or False does not."""


class Callbacks:
    """Objects with `round_end(round, server)`, or functions of the same two arguments.

    | what it gives back | what follows |
    |---|---|
    | None, False | the run goes on |
    | True | the run ends after this round, as if it had been its last |
    | a text | the same; the text is the reason that the summary has |

    All of them are called in every round, in their order, also when one has ended the run.

    >>> from fedglad.records import Record, Round
    >>> def good_enough(round, server):
    ...     return round.test_accuracy > 0.9 and "good enough"
    >>> played = Round(0, (1, 2), Record("stepped"), test_accuracy=0.95)
    >>> Callbacks([good_enough]).round_end(played, server=None)
    'callback good_enough: good enough'
    """

    def __init__(self, given: Any = ()) -> None:
        if callable(given) or hasattr(given, "round_end"):
            given = [given]
        self.calls = [(_name(callback), _call(callback)) for callback in given]

    def round_end(self, round: Round, server: Any) -> str:
        """Calls all of them; why the run is to end, or empty if it is not."""
        reasons = list[str]()
        for name, call in self.calls:
            try:
                answer = call(round, server)
                if isinstance(answer, bool | np.bool_ | None):
                    reasons += [f"callback {name}"] if answer else []
                elif isinstance(answer, str):
                    reasons += [f"callback {name}: {answer}"] if answer else []
                else:
                    raise TypeError(
                        f"it gave back {answer!r}: True or a text ends the run, None or False "
                        "lets it go on"
                    )
            except Exception as error:
                error.add_note(f"In the callback {name}, after round {round.t}.")
                raise
        return "; ".join(reasons)


def _call(callback: Any) -> Callable[[Round, Any], Answer]:
    call = getattr(callback, "round_end", callback)
    if isinstance(callback, type) or not callable(call):
        raise ValueError(
            f"callback {callback!r}: it must be a function of (round, server), or an object that "
            "has one called round_end"
        )
    return call


def _name(callback: Any) -> str:
    named = getattr(callback, "__qualname__", None)
    return (named or type(callback).__qualname__).rpartition(".<locals>.")[2]
