"""What of an update is summed, and what its sums are: all that a round of `step_sums` asks for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedglad.secure.fixed import FixedPoint, Refused

CHUNK = 1 << 18  # elements that are in memory in float64 at a time
FIXED = 4  # numbers before those of tensors: Σw, Σw², Σw·loss, Σw of those who have a loss


@dataclass(frozen=True, kw_only=True)
class Summed:
    """The sums, by name."""

    total: dict[str, np.ndarray]
    sum_sq: dict[str, float]
    sum_sq2: dict[str, float]
    weight: float
    weight_sq: float
    buffers: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    loss: float | None = None


def pack(
    sent: Mapping[str, np.ndarray],
    trained: Mapping[str, np.ndarray],
    parameters: Sequence[str],
    buffers: Sequence[str],
    *,
    weight: float,
    loss: float | None,
    point: FixedPoint,
) -> tuple[np.ndarray, list[int]]:
    """w (θ − θ_k) as integers; and w, w², w·loss, w‖g‖² and w²‖g‖² of each tensor, w·buffers.

    The norms are those of the integers, so that they belong to what is added, whatever it is
    rounded to.
    """
    _require_form(sent, trained, parameters, buffers)
    if not 0 < weight < math.inf:
        raise Refused(f"the weight is {weight}, not a positive finite number")
    body = np.empty(sum(sent[name].size for name in parameters), np.uint64)
    loss = loss if loss is not None and math.isfinite(loss) else None
    known = (0.0, 0.0) if loss is None else (weight * loss, weight)
    numbers = point.encode_numbers([weight, weight**2, *known], "the weight, or its loss,")
    start = 0
    for name in parameters:
        before, after = sent[name].reshape(-1), trained[name].reshape(-1)
        sq = 0.0  # ‖w g‖², as rounded
        for k in range(0, before.size, CHUNK):
            g = before[k : k + CHUNK].astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):  # it is refused for what comes of it
                g -= after[k : k + CHUNK]
                g *= weight
            part = point.encode(g, repr(name))
            body[start + k : start + k + part.size] = part
            rounded = point.decode(part)
            sq += float(rounded @ rounded)
        start += before.size
        numbers += point.encode_numbers([sq / weight, sq], f"the squared norm of {name!r}")
    for name in buffers:
        values = [weight * value for value in trained[name].reshape(-1).tolist()]
        numbers += point.encode_numbers(values, repr(name))
    return body, numbers


def unpack(
    body: np.ndarray,
    numbers: Sequence[float],
    model: Mapping[str, np.ndarray],
    parameters: Sequence[str],
    buffers: Sequence[str],
) -> Summed:
    """The sums of what clients packed; `model` has the shapes and dtypes.

    Raises ValueError if they are of another size.
    """
    shapes = {name: model[name].shape for name in (*parameters, *buffers)}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    count = FIXED + 2 * len(parameters) + sum(sizes[name] for name in buffers)
    if body.size != sum(sizes[name] for name in parameters) or len(numbers) != count:
        raise ValueError(
            f"the sum has {body.size} elements and {len(numbers)} numbers, not those of the model"
        )
    weight, weight_sq, loss, with_loss = numbers[:FIXED]
    norms = numbers[FIXED : FIXED + 2 * len(parameters)]
    rest = np.array(numbers[FIXED + 2 * len(parameters) :])
    total: dict[str, np.ndarray] = {}
    means: dict[str, np.ndarray] = {}
    start = 0
    for name in parameters:
        total[name] = body[start : start + sizes[name]].reshape(shapes[name])
        start += sizes[name]
    start = 0
    for name in buffers:
        mean = rest[start : start + sizes[name]].reshape(shapes[name]) / (weight or 1.0)
        dtype = model[name].dtype
        means[name] = (mean if dtype.kind == "f" else np.rint(mean)).astype(dtype)
        start += sizes[name]
    return Summed(
        total=total,
        sum_sq=dict(zip(parameters, norms[::2], strict=True)),
        sum_sq2=dict(zip(parameters, norms[1::2], strict=True)),
        weight=weight,
        weight_sq=weight_sq,
        buffers=means,
        loss=loss / with_loss if with_loss > 0 else None,
    )


def _require_form(
    sent: Mapping[str, np.ndarray],
    trained: Mapping[str, np.ndarray],
    parameters: Sequence[str],
    buffers: Sequence[str],
) -> None:
    """Raises Refused unless what was trained has the names, shapes and kinds of what was sent."""
    if {*parameters, *buffers} != {*sent}:
        raise Refused("the server's parameters and buffers are not the arrays that it sent")
    if odd := sent.keys() ^ trained.keys():
        raise Refused(f"what was sent and what was trained differ in {min(odd)!r}")
    for name, array in sent.items():
        other = trained[name]
        if array.shape != other.shape:
            raise Refused(f"{name!r} has the shape {other.shape}, not {array.shape}")
        if (array.dtype.kind == "f") != (other.dtype.kind == "f"):
            raise Refused(f"{name!r} is {other.dtype}, not {array.dtype}")
        if other.dtype.kind not in "fiub":
            raise Refused(f"{name!r} is {other.dtype}: no number that can be summed")
