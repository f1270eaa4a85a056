"""Lines in the log of the engine that carries the messages, so that a user has one log to read."""

import logging
from typing import Any

_fedglad = logging.getLogger("fedglad")


class Log:
    """An engine's log, and with it that of the run's folder."""

    def __init__(self, name: str) -> None:
        self._theirs = logging.getLogger(name)

    def info(self, text: str, *values: Any) -> None:
        """Logs a line."""
        self._theirs.info(text, *values)
        self._to_folder(logging.INFO, text, values)

    def warn(self, text: str, *values: Any) -> None:
        """Logs a warning."""
        self._theirs.warning(text, *values)
        self._to_folder(logging.WARNING, text, values)

    def lost(self, text: str) -> None:
        """Logs a warning that the run's folder has already."""
        self._theirs.warning("%s", text)

    def _to_folder(self, level: int, text: str, values: tuple[Any, ...]) -> None:
        """Also what is not a warning, whatever level the program that we are part of has chosen."""
        for handler in _fedglad.handlers:
            handler.handle(_fedglad.makeRecord("fedglad", level, "", 0, text, values, None))
