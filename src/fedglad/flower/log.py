"""Lines in Flower's log, so that a user has one log to read."""

import logging
from typing import Any

_flower, _ours = logging.getLogger("flwr"), logging.getLogger("fedglad")


def info(text: str, *values: Any) -> None:
    """Logs how a run goes."""
    _flower.info(text, *values)


def warn(text: str, *values: Any) -> None:
    """Logs what somebody should look at, also in the log of the run's folder, if there is one."""
    _flower.warning(text, *values)
    if _ours.handlers:
        _ours.warning(text, *values)
