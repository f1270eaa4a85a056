"""What form an update must have before it may touch a sum."""

import math
import operator
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, strided

from fedglad.core.guard import Rejected
from fedglad.core.layout import Layout, as_tensor
from fedglad.records import Update

WEIGHTS = (1e-12, 1e18)  # what a float32 sum of weighted updates can hold
FEW = 16  # gaps that are looked at one by one
LONGEST = 200  # characters of a client's id
BITS = 128  # of an id that is a number


@dataclass(slots=True)
class Opened:
    """An update whose form is right, as the server works with it until it is in the sums.

    | field | meaning |
    |---|---|
    | `entry` | its line in the record |
    | `weight` | as the client gives it |
    | `tensors` | one flat tensor per parameter, or the packed vector |
    | `steps` | the client's local steps, where known |
    | `trained` | whether the tensors are θ_k, not θ − θ_k |
    | `buffers`, `extra` | what goes with the parameters |
    | `changed` | which buffers differ from those that were sent out, where the guard looks |
    | `raw`, `sq`, `norm` | set once it is measured: the weight that the guard looks at, ‖g‖² of |
    |                     | each tensor, and ‖g‖, as they enter the mean |
    | `factor` | what the weighting multiplies its weight with, past the guard |
    | `clip` | what the guard multiplies it with |
    | `far` | why it is left out, unless most are like it; "" for a usual one |
    | `lengths` | what the guard measured of it, and remembers if it is accepted |
    | `place` | where an estimator has it on disk |
    | `position` | where it stands in the cohort |
    | `unit` | the weight that its own is relative to: that of the first one of its block |
    """

    entry: dict[str, Any]
    weight: float
    tensors: list[Tensor] | Tensor
    steps: int | None = None
    trained: bool = False
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    extra: "Opened | None" = None
    changed: np.ndarray | None = None
    raw: float = field(init=False)
    sq: np.ndarray = field(init=False)
    norm: float = field(init=False)
    factor: float = 1.0
    clip: float = 1.0
    far: str = ""
    lengths: dict[str, float] = field(default_factory=dict[str, float])
    place: int = -1
    position: int = 0
    unit: float = 0.0

    @property
    def counted(self) -> float:
        """Its weight before all weights are divided by their sum."""
        return self.raw * self.factor


def open_update(
    update: Update, layout: Layout, entry: dict[str, Any], *, wants_extra: bool, wants_steps: bool
) -> Opened:
    """The update, opened; raises Rejected unless names, shapes and dtypes are the model's."""
    weight = _weight(update.weight)
    trained = update.model is not None
    if update.model is not None:
        tensors = _parameters(update.model, layout, "model")
    else:
        assert update.delta is not None
        tensors = _tensors(update.delta, layout, "delta")
    sent = update.model if trained else update.buffers
    names = layout.buffers if sent is not None else ()
    buffers = {name: _buffer(sent or {}, name, layout) for name in names}
    extra = None
    if wants_extra:
        if update.extra is None:
            raise Rejected("the method needs Update(extra=...), and there is none")
        extra = Opened({}, 1.0, _tensors(update.extra, layout, "extra"))
    steps = _steps(update.steps)
    if wants_steps and steps is None:
        raise Rejected(f"the method needs Update(steps=...), got {_shown(update.steps)}")
    return Opened(entry, weight, tensors, steps, trained, buffers, extra)


def as_number(value: Any) -> float | None:
    """A finite float, or None for anything else a client may send."""
    try:
        number = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def identity(client: Any) -> int | str | None:
    """A client's id as JSON can hold it: numpy's integers become Python's."""
    if client is None:
        return client
    try:
        return operator.index(client)
    except TypeError:
        return str(client)[: LONGEST + 1]


def _shown(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer with more digits than Python will print
        return f"a huge {type(value).__name__}"


def _weight(value: Any) -> float:
    weight = as_number(value)
    if weight is None or weight <= 0:
        raise Rejected(f"weight {_shown(value)} is not a positive finite number")
    if not WEIGHTS[0] <= weight <= WEIGHTS[1]:
        raise Rejected(f"weight {weight:.4g} is not between {WEIGHTS[0]:g} and {WEIGHTS[1]:g}")
    return weight


def _steps(value: Any) -> int | None:
    """A number of local steps, or None for anything else a client may send."""
    try:
        steps = operator.index(value)
    except TypeError:
        return None
    return steps if 0 < steps < 1 << 53 else None


def _tensors(value: Mapping[str, Any] | Tensor, layout: Layout, what: str) -> list[Tensor] | Tensor:
    if not isinstance(value, Tensor):
        return _parameters(value, layout, what)
    packed = _readable(value, what)
    if packed.shape != (layout.size,) or packed.dtype != layout.dtype:
        raise Rejected(
            f"{what} is one tensor of shape {tuple(packed.shape)}, {packed.dtype}: "
            f"a packed vector has shape ({layout.size},), {layout.dtype}"
        )
    return packed.to(layout.device).contiguous()


def have_padding(layout: Layout, packed: Tensor) -> bool:
    """Whether a packed vector, or one of many, is not zero where no tensor lies.

    It would count in the norms.
    """
    if packed.dim() > 1 and len(layout.gaps) <= FEW:
        return any(bool(packed[:, gap].any()) for gap in layout.gaps)
    return bool(packed[..., layout.padding].any())


def _parameters(arrays: Mapping[str, Any], layout: Layout, what: str) -> list[Tensor]:
    known = layout.index.keys() | layout.aliases.keys() | layout.buffers.keys()
    known |= layout.constants
    if not isinstance(arrays, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Rejected(f"{what} is a {type(arrays).__name__}, not a dict of tensors")
    for name in arrays:
        if name not in known and not str(name).endswith("_extra_state"):
            raise Rejected(f"{what} has an extra tensor {_shown(name)}")
    tensors: list[Tensor] = []
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if name not in arrays:
            raise Rejected(f"{what} has no tensor {name!r}")
        tensor = _readable(arrays[name], name)
        if not tensor.is_floating_point():
            raise Rejected(f"{name!r} is {tensor.dtype}, not floating point")
        if tensor.shape != shape:
            raise Rejected(f"{name!r} has shape {tuple(tensor.shape)}, not {shape}")
        tensors.append(tensor.reshape(-1))
    for alias, name in layout.aliases.items():
        if alias in arrays:
            twin = _readable(arrays[alias], alias)
            first = tensors[layout.index[name]]
            if not twin.is_floating_point():
                raise Rejected(f"{alias!r} is {twin.dtype}, not floating point")
            if twin.data_ptr() != first.data_ptr() and not twin.reshape(-1).equal(first):
                raise Rejected(f"{alias!r} is tied to {name!r} and differs from it")
    return tensors


def is_counter(name: str) -> bool:
    """Whether a buffer counts batches, and so never falls."""
    return name.endswith("num_batches_tracked")


def _buffer(arrays: Mapping[str, Any], name: str, layout: Layout) -> Tensor:
    if name not in arrays:
        raise Rejected(f"there is no buffer {name!r}")
    tensor = _readable(arrays[name], name)
    shape, dtype = layout.buffers[name]
    if tensor.shape != shape:
        raise Rejected(f"{name!r} has shape {tuple(tensor.shape)}, not {shape}")
    if tensor.is_floating_point() != dtype.is_floating_point or tensor.is_complex():
        raise Rejected(f"{name!r} is {tensor.dtype}, not {dtype}")
    cast = tensor.to(layout.device, dtype)
    if dtype.is_floating_point and not bool(cast.double().isfinite().all()):
        raise Rejected(f"{name!r} holds NaN or inf as {dtype}")
    if name.endswith("running_var") and bool((cast.double() < 0).any()):  # uint16 has no <
        raise Rejected(f"{name!r} is a variance, and holds {float(cast.double().min()):.4g}")
    return cast


def _readable(value: Any, name: str) -> Tensor:
    try:
        tensor = as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Rejected(f"{name!r} cannot be read as a tensor: {error}") from error
    if tensor.layout != strided or tensor.is_quantized or tensor.is_meta:
        raise Rejected(f"{name!r} is not a plain dense tensor")
    return tensor
