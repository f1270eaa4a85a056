"""Lines in Flower's log, so that a user has one log to read, and in that of the run's folder."""

import logging
from typing import Any

_flower, _fedglad = logging.getLogger("flwr"), logging.getLogger("fedglad")


def info(text: str, *values: Any) -> None:
    """Logs a line."""
    _flower.info(text, *values)
    _to_folder(logging.INFO, text, values)


def warn(text: str, *values: Any) -> None:
    """Logs a warning."""
    _flower.warning(text, *values)
    _to_folder(logging.WARNING, text, values)


def only_in_flower(text: str) -> None:
    """Logs a warning that the run's folder has already."""
    _flower.warning("%s", text)


def _to_folder(level: int, text: str, values: tuple[Any, ...]) -> None:
    """Also what is not a warning, whatever level the program that we are part of has chosen."""
    if _fedglad.handlers:
        _fedglad.handle(_fedglad.makeRecord("fedglad", level, "", 0, text, values, None))
