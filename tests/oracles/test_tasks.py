"""Every metric of every task: by hand, against scikit-learn and transformers, and by chunks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from fedglad.simulation.engines.base import measure
from fedglad.tasks import (
    CausalLM,
    Classification,
    MultiLabel,
    NextToken,
    Regression,
    Segmentation,
    Task,
)
from fedglad.tasks.base import added, as_task, finished
from fedglad.tasks.classification import More

sk: Any = metrics

ALL: tuple[More, ...] = (
    "top_k",
    "balanced_accuracy",
    "macro_f1",
    "calibration_error",
    "per_class",
)


def found(task: Any, scores: Tensor, y: Tensor) -> dict[str, float]:
    return task.finish(task.metrics_of(scores, y))


def by_chunks(task: Any, scores: Tensor, y: Tensor, bounds: Sequence[int]) -> dict[str, float]:
    parts = zip(scores.tensor_split(bounds), y.tensor_split(bounds), strict=True)
    return finished(task, added(task.metrics_of(*part) for part in parts))


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(seed: int, classes: int, *shape: int) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def logits(*probabilities: Sequence[float]) -> Tensor:
    return torch.tensor(probabilities).log()


# ------------------------------------------------------------------------------- classification


def test_classification_by_hand():
    # Labels 0, 0, 1, 2; said 0, 1, 1, 1. A fifth has no label.
    scores = logits([0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.2, 0.7, 0.1], [0.2, 0.5, 0.3], [1, 1, 1])
    y = torch.tensor([0, 0, 1, 2, -100])
    metrics = found(Classification(also=ALL, k=2, bins=2), scores, y)
    assert metrics["loss"] == pytest.approx(-(2 * math.log(0.7) + 2 * math.log(0.3)) / 4, rel=1e-6)
    assert metrics["accuracy"] == 2 / 4
    assert metrics["top_2_accuracy"] == 4 / 4  # the second label is second, and so is the fourth
    # Recognised: 1 of 2, 1 of 1, 0 of 1.
    assert metrics["balanced_accuracy"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert [metrics[f"class_{c}_accuracy"] for c in range(3)] == [1 / 2, 1, 0]
    # Class 0: TP 1, FN 1; class 1: TP 1, FP 2; class 2: FN 1.
    assert metrics["macro_f1"] == pytest.approx((2 / 3 + 2 / 4 + 0) / 3)
    # Confidences 0.7, 0.6, 0.7 (right, wrong, right) lie above a half; 0.5 (wrong) does not.
    assert metrics["calibration_error"] == pytest.approx(
        3 / 4 * abs(2 / 3 - 2.0 / 3) + 1 / 4 * 0.5, abs=1e-7
    )


def expected_calibration(scores: Tensor, y: Tensor, bins: int) -> float:
    """Bin by bin, as it is written."""
    probabilities = scores.softmax(dim=1).double()
    total = 0.0
    for b in range(bins):
        inside = [
            i
            for i, row in enumerate(probabilities)
            if b / bins < float(row.max()) <= (b + 1) / bins
        ]
        if inside:
            accuracy = np.mean([int(scores[i].argmax()) == int(y[i]) for i in inside])
            confidence = np.mean([float(probabilities[i].max()) for i in inside])
            total += len(inside) / len(y) * abs(float(accuracy - confidence))
    return total


@pytest.mark.parametrize(("classes", "met"), [(2, 2), (5, 5), (7, 4)])
def test_classification_as_scikit_learn_has_it(classes: int, met: int):
    scores, y = 2 * drawn(1, 90, classes), labels(2, met, 90)
    metrics = found(Classification(also=ALL, k=2), scores, y)
    said, p = scores.argmax(dim=1), scores.softmax(dim=1).double()
    every = list(range(classes))
    assert metrics["loss"] == pytest.approx(
        sk.log_loss(y, p / p.sum(dim=1, keepdim=True), labels=every), rel=1e-6
    )
    assert metrics["accuracy"] == pytest.approx(sk.accuracy_score(y, said))
    assert metrics["macro_f1"] == pytest.approx(sk.f1_score(y, said, average="macro"))
    assert metrics["balanced_accuracy"] == pytest.approx(
        sk.recall_score(y, said, average="macro", labels=list(range(met)))
    )
    if classes > 2:
        assert metrics["top_2_accuracy"] == pytest.approx(
            sk.top_k_accuracy_score(y, scores, k=2, labels=every)
        )
    recalls = sk.recall_score(y, said, average=None, labels=list(range(met)))
    assert [metrics[f"class_{c}_accuracy"] for c in range(met)] == pytest.approx(list(recalls))
    assert f"class_{met}_accuracy" not in metrics  # it never occurs
    assert metrics["calibration_error"] == pytest.approx(expected_calibration(scores, y, 15))


def test_scores_that_are_not_finite_give_nan_and_no_error():
    scores = torch.tensor([[1.0, 2.0], [math.inf, 0.0], [math.nan, 0.0]])
    metrics = found(Classification(also=ALL), scores, torch.tensor([1, 0, 0]))
    assert math.isnan(metrics["loss"])
    assert math.isnan(metrics["calibration_error"])
    assert 1 / 3 <= metrics["accuracy"] <= 1


def test_more_than_all_classes_are_all_of_them():
    assert found(Classification(also=("top_k",)), drawn(1, 9, 3), labels(1, 3, 9))[
        "top_5_accuracy"
    ] == pytest.approx(1)


# ---------------------------------------------------------------------------------- multi-label


def test_multi_label_by_hand():
    scores = torch.tensor([[1.0, -1.0, -1.0], [2.0, 3.0, -1.0]])
    y = torch.tensor([[1, 1, 0], [0, 1, 0]])
    metrics = found(MultiLabel(), scores, y)
    # Label 0: TP 1, FP 1; label 1: TP 1, FN 1; label 2: nothing, which counts 0.
    assert metrics["micro_f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert metrics["macro_f1"] == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)
    assert metrics["accuracy"] == pytest.approx(4 / 6)
    softplus = [math.log1p(math.exp(s)) for s in (-1, 1, -1, 2, -3, -1)]
    assert metrics["loss"] == pytest.approx(sum(softplus) / 6, rel=1e-6)


@pytest.mark.parametrize("kind", [torch.int64, torch.float32, torch.bool])
def test_multi_label_as_scikit_learn_has_it(kind: torch.dtype):
    scores, y = drawn(3, 50, 4), labels(4, 2, 50, 4)
    y[:, 3], scores[:, 3] = 0, -1  # a label that is neither there nor said
    metrics = found(MultiLabel(), scores, y.to(kind))
    said = (scores > 0).long()
    for average in ("micro", "macro"):
        wanted = sk.f1_score(y, said, average=average, zero_division=0)
        assert metrics[f"{average}_f1"] == pytest.approx(wanted)
    assert metrics["accuracy"] == pytest.approx(1 - sk.hamming_loss(y, said))
    p = scores.double().sigmoid().flatten()
    assert metrics["loss"] == pytest.approx(sk.log_loss(y.flatten(), p), rel=1e-6)


def test_no_label_at_all_is_nothing_recognised():
    metrics = found(MultiLabel(), -torch.ones(3, 2), torch.zeros(3, 2))
    assert (metrics["micro_f1"], metrics["macro_f1"], metrics["accuracy"]) == (0, 0, 1)


# ----------------------------------------------------------------------------------- regression


@pytest.mark.parametrize(
    ("kind", "loss"),
    # errors 0, −1 and 3: squares, absolute values, and 0, ½, 1 · (3 − ½) of Huber's
    [("mse", 10 / 3), ("l1", 4 / 3), ("huber", 3 / 3)],
)
def test_regression_by_hand(kind: Any, loss: float):
    scores, y = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([1.0, 3.0, 3.0])
    metrics = found(Regression(kind=kind), scores, y)
    assert metrics["loss"] == pytest.approx(loss)
    assert metrics["mae"] == pytest.approx(4 / 3)
    # The mean is 7/3, and the squares of what is left 16/9 + 4/9 + 4/9.
    assert metrics["r2"] == pytest.approx(1 - 10 / (24 / 9))


def test_hubers_error_is_linear_from_delta_on():
    # error 4, delta 2: 2 · (4 − 2/2)
    assert found(Regression(kind="huber", delta=2), torch.zeros(1), torch.tensor([4.0]))[
        "loss"
    ] == pytest.approx(6)


@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 3), (40, 2, 3)])
def test_regression_as_scikit_learn_has_it(shape: tuple[int, ...]):
    scores, y = drawn(5, *shape), drawn(6, *shape)
    metrics = found(Regression(), scores, y)
    flat = y.reshape(40, -1), scores.reshape(40, -1)
    assert metrics["loss"] == pytest.approx(sk.mean_squared_error(*flat), rel=1e-6)
    assert metrics["mae"] == pytest.approx(sk.mean_absolute_error(*flat), rel=1e-6)
    assert metrics["r2"] == pytest.approx(sk.r2_score(*flat), rel=1e-6)


@pytest.mark.parametrize(
    ("given", "wanted"), [((40,), (40, 1)), ((40, 1), (40,)), ((40, 1), (40, 1))]
)
def test_one_number_a_sample_may_have_a_dimension_of_its_own(
    given: tuple[int, ...], wanted: tuple[int, ...]
):
    scores, y = drawn(5, *given), drawn(6, *wanted)
    assert Regression().misfit(scores, y) == ""
    # and never a table of 40 × 40 differences
    assert Regression().loss_of(scores, y) == mse_loss(scores.flatten(), y.flatten())


@pytest.mark.parametrize("offset", [0.0, 2e3, 1e6])
def test_r2_of_numbers_far_from_zero_loses_no_digits(offset: float):
    y = torch.arange(8, dtype=torch.float64) / 8 + offset
    scores = y + torch.tensor([0.1, -0.1] * 4, dtype=torch.float64)
    for bounds in ([], [3], [1, 2, 7]):
        metrics = by_chunks(Regression(), scores, y, bounds)
        assert metrics["r2"] == pytest.approx(sk.r2_score(y, scores), abs=1e-6)


@pytest.mark.parametrize(
    ("value", "error", "r2"), [(3.0, 0.0, 1.0), (0.1, 0.5, 0.0), (0.0, 1.0, 0.0)]
)
def test_r2_of_equal_targets_is_as_in_scikit_learn(value: float, error: float, r2: float):
    y = torch.full((10,), value)
    for bounds in ([], [3]):
        assert by_chunks(Regression(), y + error, y, bounds)["r2"] == r2
    if value != 0.1:  # whose mean is rounded there
        assert sk.r2_score(y, y + error) == r2


def test_targets_that_are_whole_numbers_are_numbers():
    assert found(Regression(), torch.tensor([1.5]), torch.tensor([2]))["mae"] == 0.5


# --------------------------------------------------------------------------------- segmentation


def test_segmentation_by_hand():
    y = torch.tensor([[[0, 0], [1, 255]]])
    said = torch.tensor([[[0, 1], [1, 2]]])
    scores = torch.where(one_hot(said, 4).permute(0, 3, 1, 2) > 0, math.log(3), 0.0)
    metrics = found(Segmentation(ignore=255), scores, y)
    assert metrics["accuracy"] == 2 / 3
    # Class 0: TP 1, FN 1; class 1: TP 1, FP 1; class 2 is said only where nothing counts.
    assert metrics["iou"] == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert metrics["dice"] == pytest.approx((2 / 3 + 2 / 3) / 2)
    # What is said has 3 of 3 + 1 + 1 + 1 parts.
    assert metrics["loss"] == pytest.approx(-(2 * math.log(3 / 6) + math.log(1 / 6)) / 3, rel=1e-6)


@pytest.mark.parametrize("ignore", [-100, 255])
def test_segmentation_as_scikit_learn_has_it(ignore: int):
    scores, y = drawn(7, 3, 4, 5, 6), labels(8, 3, 3, 5, 6)  # class 3 is only said
    y[0, :2] = ignore
    metrics = found(Segmentation(ignore=ignore), scores, y)
    counted = (y != ignore).flatten()
    there, said = y.flatten()[counted], scores.argmax(dim=1).flatten()[counted]
    assert metrics["iou"] == pytest.approx(sk.jaccard_score(there, said, average="macro"))
    assert metrics["dice"] == pytest.approx(sk.f1_score(there, said, average="macro"))
    assert metrics["accuracy"] == pytest.approx(sk.accuracy_score(there, said))
    assert metrics["loss"] == pytest.approx(float(cross_entropy(scores, y, ignore_index=ignore)))


def test_voxels_are_labelled_too():
    scores, y = drawn(7, 2, 3, 2, 4, 4), labels(8, 3, 2, 2, 4, 4)
    assert Segmentation().misfit(scores, y) == ""
    said = scores.argmax(dim=1).flatten()
    wanted = sk.jaccard_score(y.flatten(), said, average="macro")
    assert found(Segmentation(), scores, y)["iou"] == pytest.approx(wanted)


# --------------------------------------------------------------------------------------- tokens


def test_next_token_by_hand():
    scores = logits([0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]).unsqueeze(0)
    metrics = found(NextToken(), scores, torch.tensor([[0, 1, -100]]))
    assert metrics["accuracy"] == 1 / 2
    assert metrics["loss"] == pytest.approx(-(math.log(0.5) + math.log(0.2)) / 2, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.sqrt(1 / (0.5 * 0.2)), rel=1e-6)


def test_a_loss_beyond_numbers_is_an_infinite_perplexity():
    scores = torch.tensor([[[0.0, 1000.0]]])
    assert found(NextToken(), scores, torch.tensor([[0]]))["perplexity"] == math.inf
    nothing = found(NextToken(), scores, torch.tensor([[-100]]))
    assert math.isnan(nothing["loss"])
    assert math.isnan(nothing["perplexity"])


@pytest.mark.parametrize("task", [NextToken(), Segmentation(ignore=-100)])
def test_a_batch_in_which_nothing_counts_changes_nothing(task: Any):
    shape = (2, 4, 3) if isinstance(task, NextToken) else (2, 3, 4, 1)
    scores = drawn(1, *shape).requires_grad_()
    y = torch.full((2, 4) if isinstance(task, NextToken) else (2, 4, 1), -100)
    loss = task.loss_of(scores, y)
    loss.backward()
    assert loss == 0
    assert scores.grad is not None
    assert not scores.grad.any()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    sizes: dict[str, Any] = {"vocab_size": 19, "n_positions": 12, "n_embd": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_layer=1, n_head=2)).eval()


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


@pytest.mark.parametrize("build", [gpt2, adapted], ids=["whole", "lora"])
def test_causal_lm_has_the_loss_of_transformers(build: Callable[[], nn.Module]):
    model, ids = build(), labels(9, 19, 5, 12)
    mask = torch.ones_like(ids)
    mask[0, 7:] = mask[3, 2:] = 0
    chosen = ids.masked_fill(mask == 0, -100)
    task = CausalLM()
    with torch.no_grad():
        alone = model(input_ids=ids, labels=ids).loss
        padded = model(input_ids=ids, attention_mask=mask, labels=chosen).loss
    x = {"input_ids": ids, "attention_mask": mask}
    for batch, wanted, count in [
        ((ids, None), alone, 5 * 11),
        ((ids, ids), alone, 5 * 11),
        (({"input_ids": ids}, None), alone, 5 * 11),
        ((x, None), padded, 3 * 11 + 6 + 1),
        ((x, chosen), padded, 3 * 11 + 6 + 1),
        (({**x, "labels": chosen}, None), padded, 3 * 11 + 6 + 1),
    ]:
        assert task.loss(model, batch).item() == pytest.approx(wanted.item(), rel=1e-6)
        sums = measure(model, task, *batch)
        assert sums["loss"][1] == sums["accuracy"][1] == count
        metrics = finished(task, sums)
        assert metrics["loss"] == pytest.approx(wanted.item(), rel=1e-6)
        assert metrics["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-5)
    parts = [
        measure(model, task, {k: v[s] for k, v in x.items()}, None) for s in (slice(1), slice(1, 5))
    ]
    assert finished(task, added(parts))["loss"] == pytest.approx(padded.item(), rel=1e-6)
    with torch.no_grad():
        said = model(input_ids=ids).logits[:, :-1].argmax(dim=-1)
    assert finished(task, measure(model, task, ids, None))["accuracy"] == pytest.approx(
        sk.accuracy_score(ids[:, 1:].flatten(), said.flatten())
    )


def test_the_gradient_of_causal_lm_is_that_of_transformers():
    model, ids = gpt2(), labels(9, 19, 3, 12)
    names = [name for name, _ in model.named_parameters()]
    CausalLM().loss(model, (ids, None)).backward()
    own = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    for name, grad, p in zip(names, own, model.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, msg=name)


# --------------------------------------------------------------------------------------- chunks

CASES: dict[str, tuple[Any, Callable[[int, int], tuple[Tensor, Tensor]]]] = {
    "classification": (
        Classification(also=ALL, k=2),
        lambda seed, n: (drawn(seed, n, 4), labels(seed, 3, n)),
    ),
    "classification with ignored": (
        Classification(also=ALL, k=2),
        lambda seed, n: (
            drawn(seed, n, 4),
            labels(seed, 3, n).masked_fill(drawn(seed + 1, n) > 0, -100),
        ),
    ),
    "multilabel": (MultiLabel(), lambda seed, n: (drawn(seed, n, 3), labels(seed, 2, n, 3))),
    "regression": (
        Regression(),
        lambda seed, n: (drawn(seed, n, 2), 3 * drawn(seed + 1, n, 2) + 50),
    ),
    "huber": (Regression(kind="huber"), lambda seed, n: (drawn(seed, n), drawn(seed + 1, n, 1))),
    "segmentation": (
        Segmentation(ignore=0),
        lambda seed, n: (drawn(seed, n, 3, 2, 2), labels(seed, 3, n, 2, 2)),
    ),
    "next-token": (
        NextToken(),
        lambda seed, n: (
            drawn(seed, n, 3, 5),
            labels(seed, 5, n, 3).masked_fill(drawn(seed + 1, n, 3) > 0.5, -100),
        ),
    ),
    "a loss function": (
        as_task(cross_entropy),
        lambda seed, n: (
            drawn(seed, n, 4),
            labels(seed, 3, n).masked_fill(drawn(seed + 1, n) > 0, -100),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 23),
    cuts=st.lists(st.integers(0, 23), max_size=4),
)
def test_chunks_of_any_sizes_add_up_to_the_whole(name: str, seed: int, n: int, cuts: list[int]):
    task, make = CASES[name]
    scores, y = make(seed, n)
    whole = finished(task, task.metrics_of(scores, y))
    parts = by_chunks(task, scores, y, sorted(min(cut, n) for cut in cuts))
    assert parts == pytest.approx(whole, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", CASES)
def test_no_sample_has_no_metrics_and_raises_nothing(name: str):
    task, make = CASES[name]
    scores, y = make(1, 4)
    metrics = finished(task, task.metrics_of(scores[:0], y[:0]))
    assert math.isnan(metrics["loss"])
    assert all(math.isnan(value) or value == 0 for value in metrics.values())


@pytest.mark.parametrize("name", CASES)
def test_the_loss_that_is_measured_is_the_loss_that_is_trained(name: str):
    task, make = CASES[name]
    scores, y = make(3, 17)
    metrics = finished(task, task.metrics_of(scores, y))
    assert metrics["loss"] == pytest.approx(float(task.loss_of(scores, y)), rel=1e-6)


# ------------------------------------------------------------------------------ what a task is


def test_a_loss_that_a_task_does_not_measure_is_added():
    class Half(Task):
        score = "error"

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return (model(batch[0]) - batch[1]).square().mean() / 2

        def metrics(self, model: nn.Module, batch: Any) -> Any:
            return {"error": (float((model(batch[0]) - batch[1]).abs().sum()), len(batch[1]))}

    model = nn.Identity()
    sums = measure(model, Half(), torch.tensor([[1.0], [5.0]]), torch.tensor([[0.0], [2.0]]))
    assert finished(Half(), sums) == {"error": (1 + 3) / 2, "loss": (1 + 9) / 2 / 2}


def test_a_loss_function_stands_for_a_task_and_a_name_does_not():
    task = as_task(mse_loss)
    assert found(task, torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])) == {"loss": 5.0}
    assert as_task(task) is task
    with pytest.raises(ValueError, match=r"task = 'regression': .* the key task.name"):
        as_task("regression")
    with pytest.raises(ValueError, match=r"the class Regression: give an object, such as Regres"):
        as_task(Regression)
