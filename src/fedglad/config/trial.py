"""Whether a model, a data set and a task go together: tried before a run begins."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedglad import tasks
from fedglad.clients.workbench import as_stored
from fedglad.core import batch
from fedglad.core.threads import threads
from fedglad.data.federation import Federation
from fedglad.records import METRIC, SHARES
from fedglad.tasks.base import ByScores, finished, score_of, scores_of
from fedglad.tasks.classification import Classification


def check(
    model: nn.Module,
    data: Federation,
    name: str,
    settings: Any = None,
    *,
    task: Any = None,
    batch_size: int = 64,
) -> None:
    """Raises ValueError if a model cannot be trained for a task on the data, or lacks scores.

    One sample of the test set is tried, and one batch of the first client through loss, backward
    and metrics, on a copy of the model. `settings` are those that built the model: what to set in
    them is named, if that is enough.
    """
    task = Classification() if task is None else task
    if lacking := [name for name in ("loss", "metrics") if not hasattr(task, name)]:
        raise ValueError(
            f"the task is a {type(task).__name__} without {' and '.join(lacking)}: it needs "
            "loss(model, batch) and metrics(model, batch)"
        )
    if lacking := [
        name for name in ("clients", "size", "client", "test") if not hasattr(data, name)
    ]:
        raise ValueError(
            f"the data is a {type(data).__name__} without {', '.join(lacking)}: it needs clients, "
            "size(k), client(k) -> (x, y) and test() -> (x, y)"
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
    if wrong := _misfit(model, one, classes, by_scores=isinstance(task, ByScores)):
        way_out = f"; {_way_out(settings, one, classes)}" if settings else ""
        raise ValueError(f"model {name} {wrong}{way_out}")
    try_task(model, data, task, (x, y), prepare=prepare, batch_size=batch_size)


def try_task(
    model: nn.Module, data: Any, task: Any, held: Any, *, prepare: Any, batch_size: int
) -> None:
    """Raises ValueError if a batch cannot go through the task's loss, backward and metrics.

    It is one of the first client; if that one has a fault of its own, one of the test set.
    """
    part, kind = slice(batch_size), _dtype(model)
    test = [batch.rows_of(tree, part) for tree in held]
    everybody = [t for t in (held[1], getattr(data, "y", None)) if isinstance(t, Tensor) and len(t)]
    try:
        first = [batch.rows_of(tree, part) for tree in batch.samples(data.client(0), *kind)]
    except Exception:  # with which it will fail alone
        first = test
    wrong = _trial(model, task, first, prepare, everybody)
    if wrong and (first is test or _trial(model, task, test, prepare, everybody)):
        whose = "the test set" if first is test else "client 0"
        raise ValueError(
            f"task {_task_name(task)} cannot be trained with the samples of {whose}: {wrong}"
        )


def _trial(
    model: nn.Module, task: Any, samples: Sequence[Any], prepare: Any, everybody: Sequence[Any]
) -> str:
    """What is wrong with a batch of a task; empty if nothing is. `everybody` are all targets that
    are at hand."""
    twin = copy.deepcopy(model)
    device = next((p.device for p in twin.parameters()), torch.device("cpu"))
    x, y = (batch.to(tree, device) for tree in samples)
    # With a GPU's driver in use, a backward pass in this process would forbid it in forked ones.
    backward = not torch.cuda.is_available()
    try:
        with threads(1), torch.random.fork_rng(devices=[]):
            if bad := _not_finite(inputs := prepare(x, False)):
                return bad
            with torch.no_grad():
                twin.eval()
                if isinstance(task, ByScores):
                    scores = scores_of(twin, inputs)
                    misfits = (task.misfit(scores, targets) for targets in (y, *everybody))
                    if wrong := next(filter(None, misfits), ""):
                        return wrong
                    sums = task.metrics_of(scores, y)
                else:
                    sums = dict(task.metrics(twin, (inputs, y)))
            if wrong := _wrong_metrics(task, sums, score_of(task).name):
                return wrong
            with torch.set_grad_enabled(backward):
                loss = task.loss(twin.train(), (prepare(x, True), y))
                if not isinstance(loss, Tensor) or loss.dim():
                    shape = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else loss
                    return f"its loss is {shape}, not one number: give the mean over the batch"
                if not bool(loss.isfinite()):
                    return f"its loss is {float(loss)} before the first step"
                if backward and not loss.requires_grad:
                    return "its loss does not depend on the model's parameters"
                if backward:
                    loss.backward()
    except Exception as error:
        return _cause(error)
    return ""


def _wrong_metrics(task: Any, sums: dict[str, Any], score: str) -> str:
    """What is wrong with a task's metrics; empty if nothing is."""
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
    return [p.dtype for p in model.parameters() if p.is_floating_point()][:1]


def _is_empty(pair: Any) -> bool:
    leaves = batch.leaves(pair[0])
    return bool(leaves) and all(hasattr(leaf, "__len__") and not len(leaf) for leaf in leaves)


def _task_name(task: Any) -> str:
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
    twin = copy.deepcopy(model).eval()
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
    cause = str(error).strip().partition("\n")[0].rstrip(".")
    return cause if isinstance(error, RuntimeError) else f"{type(error).__name__}: {cause}"


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
