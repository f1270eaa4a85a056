"""The mod that reports norms, in Flower's own ClientApp, alone and around Flower's mods."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.supercore.task_identity import TaskIdentity

from fedglad import Glad, Server, Update
from fedglad.flower import report_norms
from fedglad.flower.mods import NORMS
from fedglad.server.from_sums import Collector

Arrays = dict[str, np.ndarray]

THETA: Arrays = {
    "w": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32),
    "half": np.array([1.0, -1.0], np.float16),
    "bn.num_batches_tracked": np.array(7),
    "b": np.array(0.5),
}
TRAINED: Arrays = {
    "w": np.array([[1.0, 0.0], [0.0, 4.0]], np.float32),
    "half": np.array([0.5, -1.0], np.float16),
    "bn.num_batches_tracked": np.array(9),
    "b": np.array(-1.5),
}


def record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def asked(arrays: Arrays = THETA, kind: str = MessageType.TRAIN, **config: Any) -> Message:
    content = RecordDict({"arrays": record(arrays), "config": ConfigRecord(config)})
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as a SuperLink would
    return Message(content, dst_node_id=1, message_type=kind)


def context() -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def replying(reply: Callable[[Message], RecordDict], *mods: Any) -> ClientApp:
    app = ClientApp(mods=list(mods))

    def handle(message: Message, _: Context) -> Message:
        return Message(reply(message), reply_to=message)

    app.train()(handle)
    app.train("again")(handle)
    app.evaluate()(handle)
    return app


def answer(arrays: Arrays = TRAINED) -> RecordDict:
    metrics = MetricRecord({"num-examples": 10, "loss": 0.5})
    return RecordDict({"arrays": record(arrays), "metrics": metrics})


def norms(reply: Message) -> Any:
    return reply.content.metric_records["metrics"].get(NORMS)


@pytest.mark.parametrize("kind", ["train", "train.again"])
def test_the_norms_of_every_array_in_the_order_sent(kind: str):
    # w: 2² + 3²; half: .5²; a counter counts as 0; b: 2²
    reply = replying(lambda _: answer(), report_norms)(asked(kind=kind), context())
    assert norms(reply) == [13.0, 0.25, 0.0, 4.0]
    assert reply.content.metric_records["metrics"]["num-examples"] == 10
    assert reply.content.array_records["arrays"] == record(TRAINED)


def test_the_order_is_that_of_the_server():
    backwards = dict(reversed(TRAINED.items()))
    reply = replying(lambda _: answer(backwards), report_norms)(asked(), context())
    assert norms(reply) == [13.0, 0.25, 0.0, 4.0]


def test_a_client_may_work_in_the_message_it_got():
    def in_place(message: Message) -> RecordDict:
        message.content["arrays"] = record(TRAINED)
        return answer()

    reply = replying(in_place, report_norms)(asked(), context())
    assert norms(reply) == [13.0, 0.25, 0.0, 4.0]


def test_large_arrays_are_measured_in_float64():
    # 3·2²⁰ + 1 differences of 1e-4: in float32 a sum of 1e-8 would stop growing
    size = (3 << 20) + 1
    theta = {"w": np.zeros(size, np.float32)}
    trained = {"w": np.full(size, 1e-4, np.float32)}
    reply = replying(lambda _: answer(trained), report_norms)(asked(theta), context())
    assert norms(reply) == [pytest.approx(size * float(np.float32(1e-4)) ** 2, rel=1e-12)]


def test_nan_and_inf_are_reported_as_they_are():
    nan, inf = np.array([[np.nan, 0], [0, 4]]), np.array([np.inf, 0], np.float16)
    trained = {**TRAINED, "w": nan, "half": inf}
    found = norms(replying(lambda _: answer(trained), report_norms)(asked(), context()))
    assert np.isnan(found[0])
    assert found[1:] == [np.inf, 0.0, 4.0]


def unreadable() -> ArrayRecord:
    found = record(TRAINED)
    found["w"] = Array(dtype="float32", shape=(2, 2), stype="numpy.ndarray", data=b"nothing")
    return found


def with_arrays(*records: ArrayRecord) -> RecordDict:
    content = answer()
    del content["arrays"]
    return RecordDict({**content, **{f"arrays{k}": r for k, r in enumerate(records)}})


ODD: dict[str, Callable[[], RecordDict]] = {
    "no arrays": with_arrays,
    "two ArrayRecords": lambda: with_arrays(record(TRAINED), record(TRAINED)),
    "a missing array": lambda: answer({k: v for k, v in TRAINED.items() if k != "b"}),
    "an extra array": lambda: answer({**TRAINED, "x": np.ones(1)}),
    "a shape that broadcasts": lambda: answer({**TRAINED, "w": np.ones((1, 2), np.float32)}),
    "integers": lambda: answer({**TRAINED, "w": np.ones((2, 2), np.int64)}),
    "unreadable": lambda: with_arrays(unreadable()),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_reply_goes_on_as_it_is(odd: str):
    reply = replying(lambda _: ODD[odd](), report_norms)(asked(), context())
    assert reply.content == ODD[odd]()


@pytest.mark.parametrize("count", [0, 2])
def test_it_needs_one_metric_record(count: int):
    def reply(_: Message) -> RecordDict:
        metrics = {f"m{k}": MetricRecord({"num-examples": 1}) for k in range(count)}
        return RecordDict({"arrays": record(TRAINED), **metrics})

    got = replying(reply, report_norms)(asked(), context())
    assert [dict(m) for m in got.content.metric_records.values()] == [{"num-examples": 1}] * count


def test_other_messages_and_errors_are_left_alone():
    reply = replying(lambda _: answer(), report_norms)(asked(kind="evaluate"), context())
    assert norms(reply) is None

    def failing(message: Message, _: Context) -> Message:
        return Message(Error(code=1, reason="no data"), reply_to=message)

    reply = report_norms(asked(), context(), failing)
    assert reply.error.reason == "no data"


def difference(reply: Message, name: str) -> np.ndarray:
    sent = reply.content.array_records["arrays"][name].numpy()
    return THETA[name].astype(np.float64) - sent


FLOATS = {name: value for name, value in THETA.items() if name in ("w", "half")}
MOVED = {name: value for name, value in TRAINED.items() if name in FLOATS}


def test_around_clipping_the_norms_are_of_the_clipped_update():
    app = replying(lambda _: answer(MOVED), report_norms, fixedclipping_mod)
    reply = app(asked(FLOATS, clipping_norm=1.0), context())
    assert norms(reply) == [
        pytest.approx(np.square(difference(reply, n)).sum(), rel=1e-12) for n in FLOATS
    ]
    assert sum(norms(reply)) == pytest.approx(1, rel=1e-3)  # of 13.25 before; half is float16


def test_around_noise_the_norms_are_of_the_noisy_update():
    noise = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=0.5, delta=1e-5)
    state = np.random.get_state()  # noqa: NPY002 - the generator that Flower uses
    try:
        np.random.seed(3)  # noqa: NPY002
        reply = replying(lambda _: answer(MOVED), report_norms, noise)(asked(FLOATS), context())
    finally:
        np.random.set_state(state)  # noqa: NPY002
    assert norms(reply) == [
        pytest.approx(np.square(difference(reply, n)).sum(), rel=1e-12) for n in FLOATS
    ]
    assert sum(norms(reply)) > 20  # σ = √(2 ln(1.25e5))/.5 = 9.7: noise, and not the clipped 1


def test_inside_clipping_the_norms_would_be_of_what_is_not_sent():
    app = replying(lambda _: answer(MOVED), fixedclipping_mod, report_norms)
    reply = app(asked(FLOATS, clipping_norm=1.0), context())
    assert norms(reply) == [13.0, 0.25]
    assert np.square(difference(reply, "w")).sum() < 1


def test_the_server_has_equal_factors_from_these_norms():
    rng = np.random.default_rng(0)
    theta = {"w": rng.normal(size=(5, 4)).astype(np.float32), "b": np.zeros(4, np.float32)}
    whole, summed = (Server(theta, adapter=Glad()) for _ in range(2))
    for _ in range(3):
        sent = {name: value.clone().numpy() for name, value in summed.params.items()}
        collector, updates = Collector(summed), list[Update]()
        for k in range(4):
            trained = {n: v - rng.normal(size=v.shape).astype(v.dtype) for n, v in sent.items()}

            def train(_: Message, trained: Arrays = trained) -> RecordDict:
                return answer(trained)

            mods = [report_norms, fixedclipping_mod]
            reply = replying(train, *mods)(asked(sent, clipping_norm=2.0), context())
            model = {n: a.numpy() for n, a in reply.content.array_records["arrays"].items()}
            updates.append(Update(model=model, weight=k + 1.0))
            collector.take(updates[-1], norms(reply))
        a, b = whole.step(updates), summed.step_sums(collector.sums())
        assert b.stepped, b.reason
        assert b.gsi == pytest.approx(a.gsi, rel=1e-6)
        assert b.scale == pytest.approx(a.scale, rel=1e-6)
        for name, value in whole.params.items():
            torch.testing.assert_close(summed.params[name], value, rtol=1e-6, atol=1e-6)


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "line", ["import fedglad.flower.mods", "from fedglad.flower import report_norms"]
)
def test_a_client_needs_neither_torch_nor_anything_of_ours(line: str):
    done = run(f"import sys; {line}; print('torch' in sys.modules, 'flwr' in sys.modules)")
    assert (done.stdout.split(), done.stderr) == (["False", "False"], "")


@pytest.mark.parametrize("name", ["FedGLAD", "Monitor", "NothingTrained"])
def test_without_flower_it_says_what_to_install(name: str):
    done = run(f"import sys; sys.modules['flwr'] = None; from fedglad.flower import {name}")
    last = done.stderr.splitlines()[-1]
    text = f"ImportError: fedglad.flower.{name} needs Flower: pip install 'fedglad[flower]'"
    assert (done.returncode, last) == (1, text)


def test_an_unknown_name_is_an_attribute_error():
    import fedglad
    import fedglad.flower

    for module in (fedglad, fedglad.flower):
        assert set(module.__all__) <= set(dir(module))
        with pytest.raises(AttributeError, match="has no attribute 'FedAvg'"):
            _ = module.FedAvg
