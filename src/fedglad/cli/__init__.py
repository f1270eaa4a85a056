"""The command `fedglad`: one module a verb, thin over the library. Nothing imports it."""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.cli.main import app as app

__getattr__, __dir__ = lazily(__name__)
