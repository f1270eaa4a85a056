"""Nothing poisons the model: what an update must be before it may touch a sum."""

import copy
import math
import operator
import reprlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, strided

from fedglad.core.layout import Layout, as_tensor
from fedglad.records import Update

MAX_NORM = 1e12
WEIGHTS = (1e-12, 1e18)  # what a float32 sum of weighted updates can hold
FEW = 16  # gaps that are looked at one by one
MEMORY = 1000  # accepted updates whose norms and weights make the running medians


class Rejected(Exception):
    """An update is left out; the message is the reason kept in the record."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Rejects an update whose norm or weight is out of all proportion.

    The measure is the running median of accepted ones; before there is any, a norm is compared
    with max(1, ‖θ‖). `math.inf` switches one of the two off, `Server(guard=None)` both.
    """

    norm: float = 100.0
    weight: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("norm", "weight"):
            value = getattr(self, name)
            if not value > 1:
                raise ValueError(f"Guard({name}={value!r}): the factor must be greater than 1")


class Limits:
    """The largest norm and weight that an update may have, by those that were accepted before.

    The medians are those from before the round, so no update can shut out another of its own
    round. A round works on a copy and keeps it only if it stepped.
    """

    def __init__(
        self, guard: Guard | None, norms: Iterable[float] = (), weights: Iterable[float] = ()
    ) -> None:
        self.guard = guard
        self.norms = deque(norms, maxlen=MEMORY)
        self.weights = deque(weights, maxlen=MEMORY)
        self.usual_norm = _median(self.norms)
        self.usual_weight = _median(self.weights)

    def copy(self) -> "Limits":
        """One that a round may change, with the medians from before it."""
        same = copy.copy(self)
        same.norms, same.weights = self.norms.copy(), self.weights.copy()
        return same

    def next(self) -> "Limits":
        """The same for the next round, with the medians of now."""
        return Limits(self.guard, self.norms, self.weights)

    def check_weight(self, weight: float) -> None:
        usual = self.usual_weight
        if self.guard and usual and weight > self.guard.weight * usual:
            limit = f"{self.guard.weight:g} times the median {usual:.4g}"
            raise Rejected(f"weight {weight:.4g} is more than {limit}")

    def check_norm(self, norm: float, model_norm: float) -> None:
        if not norm <= MAX_NORM:
            raise Rejected(f"norm {norm:.3g} is above {MAX_NORM:.0e}")
        usual, what = self.usual_norm, "the median"
        if not usual:
            usual, what = max(1.0, model_norm), "max(1, the model's norm)"
        if self.guard and norm > self.guard.norm * usual:
            raise Rejected(
                f"norm {norm:.4g} is more than {self.guard.norm:g} times {what} {usual:.4g}"
            )

    def remember(self, weight: float, norm: float) -> None:
        """Notes an update that was accepted."""
        self.weights.append(weight)
        self.norms.append(norm)


def _median(values: Collection[float]) -> float:
    """The lower median; 0 if there is none."""
    middle = (len(values) - 1) // 2
    array = np.fromiter(values, float, len(values))
    return float(np.partition(array, middle)[middle]) if values else 0.0


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
    | `raw`, `sq`, `norm` | set once it is measured: the weight before all weights are made to sum |
    |                     | to 1, ‖g‖² of each tensor, and ‖g‖ |
    """

    entry: dict[str, Any]
    weight: float
    tensors: list[Tensor] | Tensor
    steps: int | None = None
    trained: bool = False
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    extra: "Opened | None" = None
    raw: float = field(init=False)
    sq: np.ndarray = field(init=False)
    norm: float = field(init=False)


def open_update(
    update: Update, layout: Layout, entry: dict[str, Any], *, wants_extra: bool
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
    return Opened(entry, weight, tensors, _steps(update.steps), trained, buffers, extra)


def as_number(value: Any) -> float | None:
    """A finite float, or None for anything else a client may send."""
    try:
        number = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def identity(client: Any) -> int | str | None:
    """A client's id as JSON can hold it: numpy's integers become Python's."""
    if client is None or isinstance(client, str):
        return client
    try:
        return operator.index(client)
    except TypeError:
        return str(client)


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
    if not isinstance(arrays, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Rejected(f"{what} is a {type(arrays).__name__}, not a dict of tensors")
    for name in arrays:
        if name not in known and not str(name).endswith("_extra_state"):
            raise Rejected(f"{what} has an extra tensor {name!r}")
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
    return cast


def _readable(value: Any, name: str) -> Tensor:
    try:
        tensor = as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Rejected(f"{name!r} cannot be read as a tensor: {error}") from error
    if tensor.layout != strided or tensor.is_quantized or tensor.is_meta:
        raise Rejected(f"{name!r} is not a plain dense tensor")
    return tensor
