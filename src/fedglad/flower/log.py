"""Lines in Flower's log, so that a user has one log to read."""

import logging
from typing import Any

_flower, _fedglad = logging.getLogger("flwr"), logging.getLogger("fedglad")

info = _flower.info


def only_in_flower(text: str) -> None:
    """Logs a warning that the run's folder has already."""
    _flower.warning("%s", text)


def warn(text: str, *values: Any) -> None:
    """Logs a warning, also to the run's folder if that has a log."""
    _flower.warning(text, *values)
    if _fedglad.handlers:
        _fedglad.warning(text, *values)
