"""Whether a model, a data set and a task go together: tried before a run begins."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedglad import tasks
from fedglad.clients.workbench import as_stored
from fedglad.core import batch
from fedglad.core.layout import twin as copied
from fedglad.core.threads import threads
from fedglad.data.federation import Federation
from fedglad.data.validation import validation_of
from fedglad.records import METRIC, SHARES
from fedglad.tasks.base import (
    ByLoss,
    ByScores,
    Task,
    chunk_of,
    finished,
    score_of,
    scores_of,
    sees_scores_alone,
)
from fedglad.tasks.classification import Classification

TRIED = 3
"""Clients that are tried if the first cannot be trained: the fault may be its own."""


def check(
    model: nn.Module,
    data: Federation,
    name: str,
    settings: Any = None,
    *,
    task: Any = None,
    batch_size: int = 64,
) -> float:
    """Raises ValueError if a model cannot be trained for a task on the data, or lacks scores.

    Else it gives the model's loss on some test samples. A sample of the test set is tried, and a
    batch of the first client through loss, backward and metrics, on a copy. `settings`
    are those that built the model: what to set in them is named, if that is enough.
    """
    task = Classification() if task is None else task
    if lacking := [name for name in ("loss", "metrics") if not _has(task, name)]:
        raise ValueError(
            f"the task is a {type(task).__name__} without {' and '.join(lacking)}: it needs "
            "loss(model, batch) and metrics(model, batch)"
        )
    if lacking := [
        name for name in ("clients", "size", "client", "test") if not hasattr(data, name)
    ]:
        raise ValueError(
            f"the data is a {type(data).__name__} without {', '.join(lacking)}: it needs clients, "
            f"size(k), client(k) -> (x, y) and test() -> (x, y){_ready_made(data)}"
        )
    held: Any = data.test()
    if isinstance(held, tuple | list) and len(held) == 2 and _is_empty(held):
        raise ValueError("the data's test set is empty")
    try:
        x, y = batch.samples(held, *_dtype(model))
    except (ValueError, TypeError) as error:
        message = str(error).replace("the client has", "it has")
        raise ValueError(f"the data's test set cannot be used: {message}") from None
    classes = _classes(y, data) if isinstance(task, Classification) else 0
    prepare = getattr(data, "prepare", as_stored)
    # Of ids the sample with the largest, which a model may not know.
    ids = isinstance(x, Tensor) and _are_ids(x)
    row = int(x.flatten(1).amax(dim=1).argmax()) if ids else 0
    one = prepare(batch.rows_of(x, slice(row, row + 1)), False)
    by_scores = sees_scores_alone(task)
    if wrong := _misfit(model, one, classes, by_scores=by_scores):
        way_out = f"; {_way_out(settings, one, classes)}" if settings else ""
        raise ValueError(f"model {name} {wrong}{way_out}")
    if not data.clients:
        raise ValueError("the data has no clients")
    if not any(True for _ in model.parameters()):
        raise ValueError(f"model {name} has no parameters: there is nothing to train")
    loss = try_task(model, data, task, (x, y), prepare=prepare, batch_size=batch_size)
    if by_scores:
        _refuse_not_finite(model, x, prepare, chunk_of(task))
    return loss


def try_task(
    model: nn.Module, data: Any, task: Any, held: Any, *, prepare: Any, batch_size: int
) -> float:
    """Raises ValueError if a batch cannot go through the task's loss, backward and metrics.

    Else it gives the loss of the test set's first samples.

    It is one of the first client, and one of the test set. A client may have a fault of its own,
    with which it fails alone: the next ones are tried then.
    """
    part, kind = slice(batch_size), _dtype(model)
    test = [batch.rows_of(tree, part) for tree in held]
    faults: list[str] = []
    for k in range(min(TRIED, data.clients)):
        try:
            given = data.client(k)
        except Exception:  # which may pass
            break
        wrong = _unusable(given, kind) or _trial(
            model,
            task,
            [batch.rows_of(tree, part) for tree in batch.samples(given, *kind)],
            prepare,
            training=True,
        )
        if not isinstance(wrong, str):
            break
        faults.append(wrong)
    if faults and len(faults) == min(TRIED, data.clients):
        raise ValueError(_cannot(task, "trained", "client 0", faults[0]))
    loss = _trial(model, task, test, prepare, training=False)
    if isinstance(loss, str):
        raise ValueError(_cannot(task, "measured", "the test set", loss))
    chosen: Any = validation_of(data)
    if chosen is not None and (wrong := _unusable(chosen, kind)):
        wrong = wrong.replace("the client has", "it has")
        raise ValueError(f"the data's validation set cannot be used: {wrong}")
    if sees_scores_alone(task):
        scores = _scores(model, batch.rows_of(held[0], slice(1)), prepare)
        if wrong := _misfit_of(task, scores, held[1]):
            raise ValueError(_cannot(task, "measured", "the test set", wrong))
        if chosen is not None and (
            wrong := _misfit_of(task, scores, batch.samples(chosen, *kind)[1])
        ):
            raise ValueError(_cannot(task, "measured", "the validation set", wrong))
        all_y = getattr(data, "y", None)
        if isinstance(all_y, Tensor) and len(all_y) and (wrong := task.misfit(scores, all_y)):
            raise ValueError(_cannot(task, "trained", "all clients", wrong))
    return loss


def _cannot(task: Any, done: str, whose: str, wrong: str) -> str:
    return f"task {_task_name(task)} cannot be {done} with the samples of {whose}: {wrong}"


def _unusable(given: Any, kind: Sequence[torch.dtype]) -> str:
    """Why a client's samples are none; empty if they are."""
    try:
        if not batch.length(batch.samples(given, *kind)[0]):
            return "the client has no samples"
    except Exception as error:
        return str(error)
    return ""


def _refuse_not_finite(model: nn.Module, x: Any, prepare: Any, chunk: int) -> None:
    """Raises ValueError if the model gives NaN for test inputs that are not finite."""
    bad = torch.zeros(batch.length(x), dtype=torch.bool)
    for leaf in batch.leaves(x):
        if leaf.is_floating_point():
            bad |= ~leaf.reshape(len(leaf), -1).isfinite().all(dim=1).cpu()
    rows = bad.nonzero().flatten()[:chunk]
    if not len(rows):
        return
    if not bool(_scores(model, batch.take(x, rows), prepare).isfinite().all()):
        raise ValueError(
            f"the test set has NaN or infinite numbers in {int(bad.sum())} of its {len(bad)} "
            f"inputs, first in sample {int(rows[0])}: mend or leave out such samples"
        )


def _scores(model: nn.Module, x: Any, prepare: Any) -> Tensor:
    twin = copied(model).eval()
    device = next(p.device for p in twin.parameters())
    with torch.no_grad(), threads(1), torch.random.fork_rng(devices=[]):
        return scores_of(twin, prepare(batch.to(x, device), False))


def _trial(
    model: nn.Module, task: Any, samples: Sequence[Any], prepare: Any, *, training: bool
) -> str | float:
    """What is wrong with a batch of a task; its loss, if nothing is."""
    twin = copied(model)
    device = next((p.device for p in twin.parameters()), torch.device("cpu"))
    x, y = (batch.to(tree, device) for tree in samples)
    # With a GPU's driver in use, a backward pass in this process would forbid it in forked ones.
    backward = training and not torch.cuda.is_available()
    try:
        with threads(1), torch.random.fork_rng(devices=[]):
            inputs = prepare(x, False)
            scores: Any = None
            if sees_scores_alone(task):
                with torch.no_grad():
                    scores = scores_of(twin.eval(), inputs)
                if wrong := _misfit_of(task, scores, y):
                    return wrong
            with torch.set_grad_enabled(backward):
                if scores is not None and not training:
                    loss = task.loss_of(scores, y)
                else:
                    loss = task.loss(twin.train(training), (prepare(x, training), y))
                if not isinstance(loss, Tensor):
                    return f"its loss is {loss!r}, a {type(loss).__name__} and not a tensor"
                if loss.dim():
                    shape = tuple(loss.shape)
                    return f"its loss is of shape {shape}, not one number: give the batch's mean"
                if not bool(loss.isfinite()):
                    return _not_finite(inputs) or (
                        f"its loss is {float(loss)} before the first step"
                    )
                if backward and not loss.requires_grad:
                    return "its loss does not depend on the model's parameters"
                if backward:
                    loss.backward()
            with torch.no_grad():
                if scores is not None and type(task).metrics is ByScores.metrics:
                    sums: Any = task.metrics_of(scores, y)
                else:
                    sums = task.metrics(twin.eval(), (inputs, y))
            if wrong := _wrong_metrics(task, sums, score_of(task).name):
                return wrong
    except ValueError as error:
        return _cause(error).removeprefix("ValueError: ")
    except IndexError as error:
        ids = [int(leaf.max()) for leaf in batch.leaves(x) if _are_ids(leaf) and leaf.numel()]
        return _cause(error) + (f"; the largest id among the inputs is {max(ids)}" if ids else "")
    except Exception as error:
        return _cause(error)
    return float(loss.detach())


def _misfit_of(task: ByScores, scores: Any, y: Any) -> str:
    """Why targets are not of the task; empty if they are."""
    if y is None or isinstance(y, Tensor):
        return task.misfit(scores, y)
    return (
        f"the targets are a {type(y).__name__}, but this task takes one tensor: an own task, with "
        "loss(model, batch) and metrics(model, batch), takes several"
    )


def _wrong_metrics(task: Any, sums: Any, score: str) -> str:
    """What is wrong with a task's metrics; empty if nothing is."""
    if not isinstance(sums, Mapping):
        return f"its metrics are {sums!r}: a dict with a sum and a count for each name is needed"
    sums = cast("Mapping[str, Any]", sums)
    for name, pair in sums.items():
        if not isinstance(pair, tuple | list) or len(cast("tuple[Any, ...]", pair)) != 2:
            return f"its metric {name!r} is {pair!r}: a sum and a count are needed"
    metrics = finished(task, {**{"loss": (0.0, 1)}, **sums})
    for name, value in metrics.items():
        if not METRIC.fullmatch(name) or name.startswith(("averaged_", "validation_")):
            return (
                f"its metric is called {name!r}: records take a-z, 0-9 and _, at most 40, and "
                "neither averaged_ nor validation_ before it"
            )
        if name.endswith(SHARES) and not (0 <= value <= 1 or math.isnan(value)):
            return (
                f"its metric {name!r} is {value:g}: by its name it is a share of one. Give "
                "the sum over the samples and their number, or name it otherwise"
            )
    if score not in metrics:
        return f"its score is {score!r}, which is not among its metrics: {', '.join(metrics)}"
    return ""


def _not_finite(x: Any) -> str:
    for leaf in batch.leaves(x):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            return (
                "there are NaN or infinite numbers among the inputs: mend or leave out such samples"
            )
    return ""


def _dtype(model: nn.Module) -> list[torch.dtype]:
    """The model's; empty if it has none."""
    trained = [p for p in model.parameters() if p.requires_grad] or [*model.parameters()]
    return [p.dtype for p in trained if p.is_floating_point()][:1]


def _is_empty(pair: Any) -> bool:
    leaves = batch.leaves(pair[0])
    return bool(leaves) and all(hasattr(leaf, "__len__") and not len(leaf) for leaf in leaves)


def _has(task: Any, name: str) -> bool:
    """Whether a task has a method of its own, and not only the one that is to be written."""
    found = getattr(type(task), name, None)
    return hasattr(task, name) and found is not getattr(Task, name)


def _ready_made(data: Any) -> str:
    """How a federation is made of what torch has its data in."""
    if isinstance(data, Iterable) or hasattr(data, "__getitem__"):
        return ". fedglad.data.from_datasets makes one of data sets or loaders, one a client"
    return ""


def _task_name(task: Any) -> str:
    if isinstance(task, ByLoss):
        return getattr(task.function, "__name__", type(task.function).__name__)
    path = f"{type(task).__module__}:{type(task).__qualname__}"
    return next((name for name, cls in tasks.REGISTRY.items() if cls == path), path.split(":")[1])


def _are_ids(x: Tensor) -> bool:
    return x.dtype in (torch.int32, torch.int64) and x.dim() > 1


def _classes(y: Any, data: Federation) -> int:
    """How many scores an input needs; 0 where the targets are not labels."""
    if not isinstance(y, Tensor) or y.dim() != 1 or y.is_floating_point() or y.is_complex():
        return 0
    classes = getattr(data, "classes", 0)
    return max(int(y.max()) + 1, classes if isinstance(classes, int) else 0)


def _misfit(model: nn.Module, x: Any, classes: int, by_scores: bool = True) -> str:
    """What is wrong between them; empty if nothing is. A copy is tried, with one thread: workers
    are forked later."""
    if not by_scores:
        return ""  # only its task knows how it is called
    twin = copied(model).eval()
    device = next((p.device for p in twin.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad(), threads(1), torch.random.fork_rng(devices=[]):
            scores: Any = scores_of(twin, batch.to(x, device))
    except Exception as error:
        shapes = batch.tree_map(lambda leaf: tuple(leaf.shape[1:]), x)
        return f"cannot take the data's inputs of shape {shapes}: {_cause(error)}"
    if not isinstance(scores, Tensor):
        return f"gives a {type(scores).__name__}, not a tensor of scores"
    if classes and not (scores.dim() == 2 and len(scores) == 1 and scores.shape[1] >= classes):
        shape = tuple(scores.shape)
        return f"gives scores of shape {shape} for one input: {classes} classes need (1, {classes})"
    return ""


def _cause(error: Exception) -> str:
    cause, kind = str(error).strip().partition("\n")[0].rstrip("."), type(error).__name__
    if not cause:
        return kind
    return cause if isinstance(error, RuntimeError) else f"{kind}: {cause}"


def _way_out(settings: Any, x: Any, classes: int) -> str:
    """The settings that would fit, if trying them shows that they do."""
    if not isinstance(x, Tensor):
        return "choose another model  (fedglad list models)"
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
