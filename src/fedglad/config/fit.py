"""Whether the settings of a model and of a data set go together."""

from __future__ import annotations

import logging
from typing import Any


def agree(model: Any, data: Any, *, quiet: bool = False) -> None:
    """Raises ValueError if a model's settings say that it reads other tokens than the data has.

    Only settings are compared, before anything is fetched: `reads` of the model's has what the
    data's should be. Other tokens of an encoder's kind may be right, so these are only logged.
    """
    for key, wanted in getattr(model, "reads", {}).items():
        given = getattr(data, key, wanted)
        if given != wanted and (key != "tokenizer" or "words" in (given, wanted)):
            name = "name" if key == "source" else key
            raise ValueError(
                f"the model reads data.{name} = {wanted!r}, and not {given!r}: set one of them"
            )
        if given != wanted and not quiet:
            logging.getLogger("fedglad").warning(
                f"model.source = {wanted!r} reads the tokens of data.tokenizer = {given!r}: right "
                "only if both have the same vocabulary"
            )
