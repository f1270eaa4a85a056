"""Starting warm: a model that begins with weights out of a file, whatever its class is.

A section [model] takes the key `weights` with any name. What counts for a run's identity is what
is in the file: its checksum stands beside its name, and moving the file changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS = "start from these: a .safetensors file, or the folder of a finished run"
CHECKSUM = "which weights these are: written by itself"


def with_weights(settings: type, source: str) -> type:
    """The class of a model's settings with the fields `weights` and `weights_checksum`.

    `source` is the name that it was asked for by: "mlp", or "package.module:Class".
    """
    own: Any = settings
    if any(one.name == "weights" for one in fields(own)):
        return settings  # it has its own meaning there

    def check_all(self: Any) -> None:
        getattr(super(made, self), "__post_init__", lambda: None)()
        if self.weights and not self.weights_checksum:
            object.__setattr__(self, "weights_checksum", checksum(self.weights))
        elif not self.weights:
            object.__setattr__(self, "weights_checksum", "")

    namespace = {
        "__doc__": own.__doc__,
        "__module__": own.__module__,
        "__post_init__": check_all,
        "own_function": getattr(own, "own_function", source),
        "added": {**getattr(own, "added", {}), "weights": "", "weights_checksum": ""},
        "places": ("weights",),
    }
    added = [
        ("weights", Annotated[str, WEIGHTS], field(default="", kw_only=True)),
        ("weights_checksum", Annotated[str, CHECKSUM], field(default="", kw_only=True)),
    ]
    frozen = own.__dataclass_params__.frozen
    made = make_dataclass(own.__name__, added, bases=(own,), namespace=namespace, frozen=frozen)
    return made


def file_of(weights: str | Path) -> Path:
    """The file that `weights` stands for; ValueError says why there is none."""
    path, key = Path(weights), f"model.weights = {str(weights)!r}"
    if path.is_dir():
        if not (path / "summary.json").is_file():
            raise ValueError(
                f"{key} is no finished run: finish it, or take its model as it is now with "
                "fedglad export"
            )
        path /= "model.safetensors"
        if not path.is_file():
            raise ValueError(f"{key} has no model.safetensors: fedglad export makes a file of it")
    if path.suffix != ".safetensors":
        raise ValueError(f"{key}: give a .safetensors file, or the folder of a finished run")
    if not path.is_file():
        raise ValueError(f"{key}: there is no such file")
    return path


def checksum(weights: str | Path) -> str:
    """The first 16 digits of the SHA-256 of the file."""
    with file_of(weights).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def load_weights(model: nn.Module, weights: str, expected: str = "") -> None:
    """Gives a model the weights of a file, all of those that are trained; ValueError says which
    do not fit, and then nothing is changed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path, key = file_of(weights), f"model.weights = {weights!r}"
    if expected and checksum(path) != expected:
        raise ValueError(
            f"{key} is another file than this run began with (model.weights_checksum = "
            f"{expected!r}): put that one there, or set model.weights_checksum='' for a new run"
        )
    try:
        given: Mapping[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{key} cannot be read: {error}") from None
    fill(model, given, key)


def fill(model: nn.Module, given: Mapping[str, Tensor], key: str) -> None:
    """Gives a model these tensors by their names; ValueError, with `key` in front, if one is not
    of this model, or one that is trained is lacking."""
    import torch

    from fedglad.core.layout import frozen

    there = model.state_dict()
    for name in (name for name in there if name not in given and name not in frozen(model)):
        raise ValueError(f"{key} has no {name!r}, which the model has: {_names(given)}")
    for name, tensor in given.items():
        if name not in there:
            raise ValueError(
                f"{key} has {name!r}, which the model has not: {_names(there, 'that')}"
            )
        if tensor.shape != there[name].shape:
            shapes = f"{tuple(tensor.shape)}, the model's is {tuple(there[name].shape)}"
            raise ValueError(f"{key} is of another model: its {name!r} is of shape {shapes}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{key}: its {name!r} has numbers that are not finite")
    with torch.no_grad():
        for name, tensor in given.items():
            there[name].copy_(tensor)


def _names(state: Mapping[str, Any], whose: str = "it", most: int = 6) -> str:
    names = [*state]
    more = ", …" if names[most:] else ""
    return f"{whose} has {', '.join(names[:most])}{more}"
