"""Flower's own log, so that a user sees one."""

import logging
from typing import Any

logger, ours = logging.getLogger("flwr"), logging.getLogger("fedglad")


def tell(text: str, *values: Any) -> None:
    """For every run."""
    logger.info(text, *values)


def note(text: str, *values: Any) -> None:
    """For what somebody should look at; also in the log of the run's folder, if there is one."""
    logger.warning(text, *values)
    if ours.handlers:
        ours.warning(text, *values)
