"""Whether a model and a data set go together: tried with one sample, before a run begins."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedglad.simulation.engines.base import Federation


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


def check(model: nn.Module, data: Federation, name: str, settings: Any = None) -> None:
    """Raises ValueError if the model cannot take the data's inputs, or lacks scores for its labels.

    `settings` are those that built the model: what to set in them is named, if that is enough.
    """
    from fedglad.clients.workbench import as_stored

    if lacking := [
        name for name in ("clients", "size", "client", "test") if not hasattr(data, name)
    ]:
        raise ValueError(
            f"the data is a {type(data).__name__} without {', '.join(lacking)}: it needs clients, "
            "size(k), client(k) -> (x, y) and test() -> (x, y)"
        )
    x, y = data.test()
    if y.is_floating_point() and y[:1].numel() > 1:
        raise ValueError(
            f"the data's targets are {tuple(y.shape[1:])} numbers each: a sample needs one label"
        )
    if not len(y):
        raise ValueError("the data's test set is empty")
    classes = _classes(y, data)
    # Of ids the sample with the largest, which a model may not know.
    row = int(x.flatten(1).amax(dim=1).argmax()) if _are_ids(x) else 0
    x = getattr(data, "prepare", as_stored)(x[row : row + 1], False)
    if wrong := _misfit(model, x, classes):
        way_out = f"; {_way_out(settings, x, classes)}" if settings else ""
        raise ValueError(f"model {name} {wrong}{way_out}")


def _are_ids(x: Tensor) -> bool:
    import torch

    return x.dtype in (torch.int32, torch.int64) and x.dim() > 1


def _classes(y: Tensor, data: Federation) -> int:
    """How many scores an input needs; 0 where the targets are not labels."""
    if y.dim() != 1 or y.is_floating_point() or y.is_complex():
        return 0
    classes = getattr(data, "classes", 0)
    return max(int(y.max()) + 1, classes if isinstance(classes, int) else 0)


def _misfit(model: nn.Module, x: Tensor, classes: int) -> str:
    """What is wrong between them; empty if nothing is. A copy is tried, with one thread: workers
    are forked later."""
    import torch
    from torch import Tensor

    from fedglad.core.threads import threads

    twin = copy.deepcopy(model).eval()
    device = next((p.device for p in twin.parameters()), x.device)
    try:
        with torch.no_grad(), threads(1), torch.random.fork_rng(devices=[]):
            scores: Any = twin(x.to(device))
    except Exception as error:
        cause = str(error).strip().partition("\n")[0].rstrip(".")
        if not isinstance(error, RuntimeError):
            cause = f"{type(error).__name__}: {cause}"
        return f"cannot take the data's inputs of shape {tuple(x.shape[1:])}: {cause}"
    if not isinstance(scores, Tensor):
        return f"gives a {type(scores).__name__}, not a tensor of scores"
    if classes and not (scores.dim() == 2 and len(scores) == 1 and scores.shape[1] >= classes):
        shape = tuple(scores.shape)
        return f"gives scores of shape {shape} for one input: {classes} classes need (1, {classes})"
    return ""


def _way_out(settings: Any, x: Tensor, classes: int) -> str:
    """The settings that would fit, if trying them shows that they do."""
    shape = {"features": x.numel(), "channels": x.shape[1:2].numel(), "size": x.shape[-1]}
    fitting = {k: v for k, v in shape.items() if getattr(settings, k, v) != v}
    if getattr(settings, "classes", classes) < classes:
        fitting["classes"] = classes
    try:
        fits = fitting and not _misfit(replace(settings, **fitting).build(), x, classes)
    except (ValueError, RuntimeError):  # there is no such model
        fits = False
    if not fits and _are_ids(x) and (tokenizer := getattr(settings, "reads", {}).get("tokenizer")):
        return f"set data.tokenizer={tokenizer}, whose ids it knows, or a smaller data.length"
    if not fits:
        return "choose another model  (fedglad list models)"
    return f"set {', '.join(f'model.{key}={value}' for key, value in fitting.items())}"
