"""One faulty client: what Flower's FedAvg makes of it, and that with FedGLAD the round goes on.

The model must be, bit for bit, that of a plain Server that was given the other clients' updates.
"""

import io
import json
import logging
import math
import pickle
import re
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fedglad import Glad
from fedglad.flower import FedGLAD, NothingTrained
from fedglad.optimizers import SGD
from fedglad.samplers.uniform import Uniform

from .grid import (
    Clock,
    Linear,
    LocalGrid,
    Normed,
    bits,
    by,
    clients,
    close,
    model,
    numpy,
    received,
    record,
    rejected,
    replay,
    server_round,
    who,
)

BAD = 3  # of five clients
Spoil = Callable[[dict[str, Any], dict[str, Any]], Any]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", found)
    return found


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Generator[Callable[[], str]]:
    """All that was logged, by Flower's logger or ours."""
    caplog.set_level(logging.INFO)
    loggers = [logging.getLogger(name) for name in ("flwr", "fedglad")]
    silent = [logger for logger in loggers if not logger.propagate]
    for logger in silent:
        logger.addHandler(caplog.handler)
    yield lambda: "\n".join(found.getMessage() for found in caplog.records)
    for logger in silent:
        logger.removeHandler(caplog.handler)


class Faulty(Linear):
    """Spoils its reply to `train` from round `since` on: arrays and metrics, or the whole."""

    def __init__(self, index: int, spoil: Spoil, *, since: int = 1) -> None:
        super().__init__(index)
        self.spoil, self.since = spoil, since

    def __call__(self, message: Message, context: Context) -> Message:
        reply = super().__call__(message, context)
        if message.metadata.message_type != "train" or server_round(message) < self.since:
            return reply
        sent = received(message)
        arrays: dict[str, Any] = dict(self.train(sent))
        metrics = self.metrics(sent)
        content: Any = self.spoil(arrays, metrics)
        if content is None:
            packed = {n: x if isinstance(x, Array) else Array(x) for n, x in arrays.items()}
            content = {"arrays": ArrayRecord(packed), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)


def with_one(spoil: Spoil, *, since: int = 1) -> list[Linear]:
    found = clients(5)
    found[BAD] = Faulty(BAD, spoil, since=since)
    return found


def start(strategy: Any, grid: LocalGrid, rounds: int = 3, **settings: Any) -> Result:
    return strategy.start(grid, record(model()), num_rounds=rounds, **settings)


def ours(**settings: Any) -> FedGLAD:
    shape: dict[str, Any] = {"fraction_evaluate": 0.0, "nodes": "partition-id"}
    return FedGLAD(**shape | settings)


def flowers(**settings: Any) -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, **settings)


def expected(strategy: FedGLAD, population: list[Linear] | None = None, **settings: Any) -> Any:
    settings = {"optimizer": SGD(), "adapter": Glad(), **settings}
    return bits(replay(strategy.records, by(population or clients(5)), model(), **settings))


# ------------------------------------------------------------------------------- what FedAvg takes


def put(name: str, change: Callable[[np.ndarray], Any]) -> Spoil:
    def spoil(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
        arrays[name] = change(arrays[name])

    return spoil


def weigh(value: Any) -> Spoil:
    def spoil(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
        metrics["num-examples"] = value

    return spoil


def nan_entry(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flat[0] = math.nan
    return x


def explode(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
    arrays.update({name: value * np.float32(1e6) for name, value in arrays.items()})


def truth() -> dict[str, np.ndarray]:
    return numpy(start(flowers(), LocalGrid(clients(5))).arrays)


def is_nan(found: dict[str, np.ndarray]) -> bool:
    return any(np.isnan(x).any() for x in found.values())


def is_far(found: dict[str, np.ndarray]) -> bool:
    return is_nan(found) or any(np.abs(x).max() > 1e3 for x in found.values())


def is_other(found: dict[str, np.ndarray]) -> bool:
    return not close(found, truth(), 1e-2)


ACCEPTED: dict[str, tuple[Spoil, int, Callable[[dict[str, np.ndarray]], bool], str]] = {
    "NaN tensor": (put("weight", nan_entry), 1, is_nan, r"'weight' holds NaN"),
    "inf tensor": (put("bias", lambda x: x / np.float32(0)), 1, is_far, r"'bias' holds NaN or inf"),
    "NaN weight": (weigh(math.nan), 1, is_nan, r"weight.* nan"),
    "inf weight": (weigh(math.inf), 1, is_nan, r"weight.* inf"),
    "1e6 times": (explode, 1, is_far, r"norm .* is more than 1\S+ times"),
    "broadcastable shape": (put("bias", lambda x: x[:1]), 1, is_other, r"'bias' has shape \(1,\)"),
    "negative weight": (weigh(-40), 1, is_other, r"weight.* -40"),
    "weight beyond floats": (weigh(1e300), 1, is_other, r"weight 1e\+300"),
}


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow):RuntimeWarning")
@pytest.mark.parametrize("fault", ACCEPTED)
def test_what_fedavg_takes_in_silence_is_left_out(fault: str):
    spoil, since, wrong, reason = ACCEPTED[fault]
    population = with_one(spoil, since=since)
    assert wrong(numpy(start(flowers(), LocalGrid(population)).arrays))

    strategy = ours()
    found = start(strategy, LocalGrid(population))
    for t, told in enumerate(strategy.records):
        assert told["status"] == "stepped"
        assert sorted(who(told)) == [0, 1, 2, 3, 4]
        bad = rejected(told)
        assert list(bad) == ([BAD] if t + 1 >= since else [])
        assert all(re.search(reason, text) for text in bad.values()), bad
    assert bits(found.arrays) == expected(strategy)


class Unlikely(Normed):
    """A client that sends statistics of BatchNorm of its own."""

    def __init__(self, index: int, sent: dict[str, np.ndarray]) -> None:
        super().__init__(index)
        self.sent = sent

    def train(self, arrays: Any) -> Any:
        return {**super().train(arrays), **self.sent}


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ({"norm.running_var": np.full(2, -10, np.float32)}, "is a variance, and holds -10"),
        ({"norm.running_mean": np.full(2, 1e9, np.float32)}, "norm of the buffers"),
        ({"norm.num_batches_tracked": np.array(2**39)}, "norm of the counters"),
    ],
)
def test_buffers_that_cannot_be_are_left_out(sent: dict[str, np.ndarray], reason: str):
    population = clients(5, Normed)
    population[BAD] = Unlikely(BAD, sent)
    strategy = ours()
    found = strategy.start(LocalGrid(population), record(model(normed=True)), num_rounds=3)
    for told in strategy.records:
        assert told["status"] == "stepped"
        assert list(rejected(told)) == [BAD]
        assert reason in rejected(told)[BAD]
    buffers = numpy(found.arrays)
    assert (buffers["norm.running_var"] > 0).all()
    assert np.abs(buffers["norm.running_mean"]).max() < 1
    assert buffers["norm.num_batches_tracked"] == 15  # three times 1 + 4, by the last client


LONG = "x" * 10**7


@pytest.mark.parametrize("what", ["array", "unreadable array", "metric"])
def test_names_of_ten_megabytes_are_not_kept(what: str):
    def spoil(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
        if what == "metric":
            metrics[LONG] = 1.0
        else:
            arrays[LONG] = Array(np.ones(1))
        if what == "unreadable array":
            arrays[LONG].data = b"nothing"

    strategy = ours()
    start(strategy, LocalGrid(with_one(spoil)), rounds=1)
    (told,) = strategy.records
    assert told["status"] == "stepped"
    assert len(json.dumps(told)) < 10_000


@pytest.mark.parametrize("loop", [FedGLAD, Strategy])
def test_who_lies_about_its_weight_does_not_stop_the_training(loop: Any):
    """Without a second cohort, or in Flower's loop: at most the first round is lost by it."""
    strategy = ours(retries=0)
    grid = LocalGrid(with_one(weigh(10**9)))
    loop.start(strategy, grid, record(model()), num_rounds=3)
    first, *later = strategy.records
    assert "weight 1e+09 is more than 10 times the median" in first["reason"]
    for told in later:
        assert told["status"] == "stepped"
        (liar,) = (client for client in told["clients"] if "claimed" in client)
        assert (liar["id"], liar["claimed"]) == (BAD, 10**9)
        assert liar["weight"] < 0.55


@pytest.mark.parametrize("since", [1, 2])
def test_a_huge_weight_is_cut(since: int):
    population = with_one(weigh(10**9), since=since)
    assert is_other(numpy(start(flowers(), LocalGrid(population)).arrays))
    strategy = ours()
    start(strategy, LocalGrid(population))
    for t, told in enumerate(strategy.records):
        assert told["status"] == "stepped"
        assert rejected(told) == {}
        claimed = [client["weight"] for client in told["clients"] if "claimed" in client]
        assert len(claimed) == (t + 1 >= since)
        assert all(weight < 0.55 for weight in claimed)


def test_a_client_without_samples_is_left_out():
    strategy = ours()
    found = start(strategy, LocalGrid(with_one(weigh(0))))
    assert all(re.search(r"weight.* 0", rejected(told)[BAD]) for told in strategy.records)
    assert bits(found.arrays) == expected(strategy)


def test_the_model_is_that_of_a_run_without_the_client():
    strategy = ours()
    found = start(strategy, LocalGrid(with_one(explode)))
    honest = [own for own in clients(5) if own.partition != BAD]
    alone = start(ours(), LocalGrid(honest))
    assert close(numpy(found.arrays), numpy(alone.arrays))


# ------------------------------------------------------------------------- what kills FedAvg's run


def extra_key(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
    arrays["head"] = np.zeros(2, np.float32)


def missing_key(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
    del arrays["bias"]


def no_weight(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
    del metrics["num-examples"]


def content(arrays: int, metrics: int) -> Spoil:
    def spoil(trained: dict[str, Any], told: dict[str, Any]) -> Any:
        return {
            **{f"arrays-{k}": record(trained) for k in range(arrays)},
            **{f"metrics-{k}": MetricRecord(told) for k in range(metrics)},
        }

    return spoil


def raw(data: Callable[[bytes], bytes], **settings: Any) -> Callable[[np.ndarray], Array]:
    """An Array whose bytes are not what they should be."""

    def change(x: np.ndarray) -> Array:
        good = Array(x)
        fields: dict[str, Any] = {
            "dtype": good.dtype,
            "shape": good.shape,
            "stype": good.stype,
            **settings,
        }
        return Array(**fields, data=data(good.data))

    return change


def saved(x: np.ndarray, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, x, **settings)
    return buffer.getvalue()


def larger_than_any_memory(good: bytes) -> bytes:
    """A header that promises 4 petabytes, and 24 bytes after it."""
    buffer = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (10**15,)}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue() + good[-24:]


PIECES = [
    b"O",
    b"|O",
    b"(-1,)",
    b"9999999999",
    b"'",
    b"{",
    b"}",
    b"True",
    b"<f8",
    b"<i4",
    b"\x93NUMPY",
]

UNREADABLE = r"(?i)cannot be read|unreadable|not readable|corrupt"

DEADLY: dict[str, tuple[Spoil, str]] = {
    "wrong shape": (put("weight", lambda x: x.T), r"'weight' has shape \(3, 2\), not \(2, 3\)"),
    "flat": (put("weight", lambda x: x.reshape(-1)), r"'weight' has shape \(6,\)"),
    "extra key": (extra_key, r"extra tensor 'head'"),
    "missing key": (missing_key, r"no tensor 'bias'"),
    "no weight": (no_weight, r"num-examples"),
    "weight in a list": (weigh([8, 9]), r"weight.*\[8, 9\]"),
    "empty reply": (content(0, 0), r"0 (Array|Metric)Records"),
    "no arrays": (content(0, 1), r"ArrayRecord"),
    "two array records": (content(2, 1), r"2 ArrayRecords|two ArrayRecords|ArrayRecords, not"),
    "no metrics": (content(1, 0), r"MetricRecord|num-examples"),
    "two metric records": (content(1, 2), r"MetricRecord"),
    "cut off": (put("weight", raw(lambda good: good[:-4])), UNREADABLE),
    "no bytes": (put("weight", raw(lambda good: b"")), UNREADABLE),
    "noise": (put("weight", raw(lambda good: bytes(range(200)))), UNREADABLE),
    "unknown form": (put("weight", raw(lambda good: good, stype="other.form")), r"(?i)read|form"),
    "petabytes": (put("weight", raw(larger_than_any_memory)), UNREADABLE),
    "text": (put("bias", lambda x: np.array(["a", "b"])), r"(?i)'?bias'?"),
    "records": (put("bias", lambda x: np.zeros(2, [("a", "f4")])), r"(?i)'?bias'?"),
}


@pytest.mark.parametrize("fault", DEADLY)
def test_what_kills_a_run_of_fedavg_is_left_out(fault: str):
    spoil, reason = DEADLY[fault]
    population = with_one(spoil)
    # Whatever it is: InconsistentMessageReplies, ValueError, EOFError, MemoryError, UFuncTypeError
    with pytest.raises(Exception):  # noqa: B017, PT011
        start(flowers(), LocalGrid(population), rounds=1)

    strategy = ours()
    found = start(strategy, LocalGrid(population))
    for told in strategy.records:
        assert told["status"] == "stepped"
        assert list(rejected(told)) == [BAD]
        assert re.search(reason, rejected(told)[BAD]), rejected(told)
    assert bits(found.arrays) == expected(strategy)


class Trap:
    """Pickled into an array; unpickling it would make the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@settings(max_examples=100, phases=[Phase.generate])
@given(st.data())
def test_no_bytes_whatever_end_the_run(data: st.DataObject):
    """A good array with some of its bytes changed, put in or cut off, mostly in its header."""
    good = bytearray(saved(np.zeros((2, 3), np.float32)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        piece = data.draw(st.binary(max_size=6) | st.sampled_from(PIECES))
        good[at : at + data.draw(st.integers(0, 30))] = piece
        good = good or bytearray(b"x")
    strategy = ours()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of odd headers
        found = start(strategy, LocalGrid(with_one(put("weight", raw(lambda _: bytes(good))))), 1)
    assert strategy.records[0]["status"] == "stepped"
    if rejected(strategy.records[0]):  # else it is still an array of that shape
        assert bits(found.arrays) == expected(strategy)


@pytest.mark.parametrize("shape", ["-" * 5000 + "1", "[" * 90, "(2, 3" + "," * 9, "{}", "(-1, 3)"])
def test_headers_that_are_hard_to_parse(shape: str):
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(24)
    strategy = ours()
    start(strategy, LocalGrid(with_one(put("weight", raw(lambda good: data)))))
    assert strategy.records[0]["status"] == "stepped"


def test_a_pickled_array_is_not_opened(tmp_path: Path):
    path = tmp_path / "opened"
    pickle.loads(pickle.dumps(Trap(path)))
    assert path.exists()  # it does go off
    path.unlink()

    trap = saved(np.array([[Trap(path)] * 3] * 2, dtype=object), allow_pickle=True)
    strategy = ours()
    start(strategy, LocalGrid(with_one(put("weight", raw(lambda good: trap)))))
    assert list(rejected(strategy.records[0])) == [BAD]
    assert not path.exists()


def test_what_the_array_says_of_itself_is_not_believed():
    """Its bytes are a (2, 3) array of floats, whatever dtype and shape are told beside them."""
    lie = put("weight", raw(lambda good: good, dtype="int8", shape=(7, 7)))
    strategy = ours()
    found = start(strategy, LocalGrid(with_one(lie)))
    assert all(rejected(told) == {} for told in strategy.records)
    assert bits(found.arrays) == expected(strategy)


# ------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.bool_, np.complex64])
def test_parameters_that_are_not_floats_are_left_out(dtype: Any):
    strategy = ours()
    found = start(strategy, LocalGrid(with_one(put("weight", lambda x: x.astype(dtype)))))
    assert all(list(rejected(told)) == [BAD] for told in strategy.records)
    assert "'weight' is torch." in rejected(strategy.records[0])[BAD]
    assert bits(found.arrays) == expected(strategy)


class Cast(Linear):
    dtype: Any = np.float64

    def train(self, arrays: Any) -> Any:
        return {name: value.astype(self.dtype) for name, value in super().train(arrays).items()}


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.dtype(">f4"), np.dtype(">f8")])
def test_other_floats_are_taken_and_the_model_keeps_its_own(dtype: Any):
    population = clients(5)
    population[BAD] = Cast(BAD)
    population[BAD].dtype = dtype  # pyright: ignore
    strategy = ours()
    found = start(strategy, LocalGrid(population))
    assert {str(x.dtype) for x in numpy(found.arrays).values()} == {"float32"}
    plain = np.dtype(dtype).newbyteorder("=")  # torch knows no other
    population[BAD].dtype = plain  # pyright: ignore
    if np.dtype(dtype).isnative:
        assert all(rejected(told) == {} for told in strategy.records)
    assert bits(found.arrays) == expected(strategy, population)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """The upper halves of float32, as arrays of that dtype are saved: |V2."""
    return (x.astype("<f4").view("<u4") >> 16).astype("<u2").view("V2")


class Brain(Linear):
    """Trains in bfloat16."""

    def train(self, arrays: Any) -> Any:
        halves = {
            n: (x.view("<u4") >> 16 << 16).view("<f4") for n, x in super().train(arrays).items()
        }
        return cast(Any, halves)


def test_bfloat16_is_read_or_left_out():
    def spoil(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
        for name, x in arrays.items():
            arrays[name] = Array("bfloat16", x.shape, "numpy.ndarray", saved(bfloat16(x)))

    strategy = ours()
    found = start(strategy, LocalGrid(with_one(spoil)))
    population = clients(5)
    population[BAD] = Brain(BAD)
    taken = not rejected(strategy.records[0])
    assert all(list(rejected(told)) == ([] if taken else [BAD]) for told in strategy.records)
    assert bits(found.arrays) == expected(strategy, population)


# ------------------------------------------------------------------------------------------ metrics


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_costs_nobody_their_round(value: float):
    def spoil(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
        metrics["train_loss"] = value

    strategy = ours()
    found = start(strategy, LocalGrid(with_one(spoil)))
    for told in strategy.records:
        losses = {client["id"]: client["loss"] for client in told["clients"]}
        assert rejected(told) == {}
        assert losses.pop(BAD) is None
        assert all(isinstance(loss, float) for loss in losses.values())
        json.dumps(told, allow_nan=False)
    assert bits(found.arrays) == expected(strategy)


def test_metrics_may_differ_between_clients():
    def spoil(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
        metrics["battery"] = 0.4
        metrics["histogram"] = [1, 2, 3]
        del metrics["train_loss"]

    population = with_one(spoil)
    with pytest.raises(Exception, match="same keys"):
        start(flowers(), LocalGrid(population))
    strategy = ours()
    found = start(strategy, LocalGrid(population))
    assert all(rejected(told) == {} for told in strategy.records)
    assert bits(found.arrays) == expected(strategy)
    # The loss of those that told one, by their samples: 8, 13, 18 and 28.
    theta, others = model(), [own for own in clients(5) if own.partition != BAD]
    mean = sum(own.n * own.loss(theta) for own in others) / sum(own.n for own in others)
    assert found.train_metrics_clientapp[1]["train_loss"] == pytest.approx(mean)


def test_metrics_keep_their_order():
    names = ["train_loss", "zeta", "alpha", "mu", "beta", "omega", "delta"]

    class Talks(Linear):
        def metrics(self, arrays: Any) -> dict[str, Any]:
            found = super().metrics(arrays)
            return {**dict.fromkeys(names, found["train_loss"]), "num-examples": self.n}

    found = start(ours(), LocalGrid([Talks(k) for k in range(3)]), rounds=1)
    assert list(found.train_metrics_clientapp[1]) == names


def test_one_odd_metric_does_not_replace_the_others():
    """Whoever comes first: a list where all others tell a number."""
    for place in range(3):

        class Odd(Linear):
            def metrics(self, arrays: Any, place: int = place) -> dict[str, Any]:
                found = super().metrics(arrays)
                odd = {"train_loss": [1.0, 2.0]} if self.partition == place else {}
                return {**found, **odd}

        population = [Odd(k) for k in range(3)]
        found = start(ours(), LocalGrid(population), rounds=1)
        others = [own for own in population if own.partition != place]
        mean = sum(own.n * own.loss(model()) for own in others) / sum(own.n for own in others)
        told = found.train_metrics_clientapp.get(1, MetricRecord())
        assert told.get("train_loss") in (None, pytest.approx(mean))


def test_the_loss_is_the_one_by_that_name_if_there_are_several():
    class Talks(Linear):
        def metrics(self, arrays: Any) -> dict[str, Any]:
            return {"aux_loss": 7.0, "a-loss-of-data": 8.0, **super().metrics(arrays)}

    strategy = ours()
    start(strategy, LocalGrid([Talks(k) for k in range(3)]), rounds=1)
    losses = {client["id"]: client["loss"] for client in strategy.records[0]["clients"]}
    assert losses == {k: pytest.approx(own.loss(model())) for k, own in enumerate(clients(3))}


@pytest.mark.parametrize("key", ["train_loss", "train-loss", "loss"])
def test_a_loss_is_kept_under_any_of_its_names(key: str):
    def spoil(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
        metrics[key] = metrics.pop("train_loss")

    strategy = ours()
    start(strategy, LocalGrid(with_one(spoil)), rounds=1)
    losses = {client["id"]: client["loss"] for client in strategy.records[0]["clients"]}
    assert losses == {k: pytest.approx(own.loss(model())) for k, own in enumerate(clients(5))}


@pytest.mark.parametrize("what", ["train", "evaluate"])
def test_a_function_of_the_users_that_raises_costs_no_round(what: str, said: Callable[[], str]):
    def broken(replies: list[RecordDict], key: str) -> MetricRecord:
        raise KeyError("accuracy")

    settings: dict[str, Any] = {f"{what}_metrics_aggr_fn": broken}
    with pytest.raises(KeyError):
        start(FedAvg(**settings), LocalGrid(clients(5)))
    strategy = FedGLAD(nodes="partition-id", **settings)
    found = start(strategy, LocalGrid(clients(5)))
    assert [told["status"] for told in strategy.records] == ["stepped"] * 3
    assert bits(found.arrays) == expected(strategy)
    assert f"{what}_metrics_aggr_fn" in said()
    assert "accuracy" in said()


def test_a_function_of_the_users_gets_the_good_replies_only():
    seen: list[list[float]] = []

    def largest(replies: list[RecordDict], key: str) -> MetricRecord:
        found = [float(cast(Any, r.metric_records["metrics"])["train_loss"]) for r in replies]
        seen.append(found)
        assert key == "num-examples"
        return MetricRecord({"largest": max(found)})

    strategy = ours(train_metrics_aggr_fn=largest)
    found = start(strategy, LocalGrid(with_one(explode)), rounds=1)
    good = [own.loss(model()) for own in clients(5) if own.partition != BAD]
    assert sorted(seen[0]) == pytest.approx(sorted(good))
    assert found.train_metrics_clientapp[1]["largest"] == pytest.approx(max(good))


def test_who_fails_in_evaluation_only_still_trains():
    class Fails(Linear):
        def __call__(self, message: Message, context: Context) -> Message:
            if message.metadata.message_type == "evaluate":
                raise MemoryError("the test set does not fit")
            return super().__call__(message, context)

    population = clients(5)
    population[BAD] = Fails(BAD)
    strategy = FedGLAD(nodes="partition-id")
    found = start(strategy, LocalGrid(population))
    assert all(rejected(told) == {} for told in strategy.records)
    assert bits(found.arrays) == expected(strategy)
    others = [own for own in clients(5) if own.partition != BAD]
    last = numpy(found.arrays)
    mean = sum(own.n * own.loss(last) for own in others) / sum(own.n for own in others)
    assert found.evaluate_metrics_clientapp[3]["eval_loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("weight", [math.nan, -3, 0, [1, 2], None])
def test_a_bad_weight_in_evaluation_does_no_harm(weight: Any):
    class Odd(Linear):
        def __call__(self, message: Message, context: Context) -> Message:
            reply = super().__call__(message, context)
            if message.metadata.message_type == "evaluate":
                metrics = cast(Any, reply.content["metrics"])
                del metrics["num-examples"]
                if weight is not None:
                    metrics["num-examples"] = weight
            return reply

    population = clients(5)
    population[BAD] = Odd(BAD)
    found = start(FedGLAD(), LocalGrid(population), rounds=1)
    others = [own for own in clients(5) if own.partition != BAD]
    last = numpy(found.arrays)
    mean = sum(own.n * own.loss(last) for own in others) / sum(own.n for own in others)
    assert found.evaluate_metrics_clientapp[1]["eval_loss"] == pytest.approx(mean, rel=1e-5)


# ---------------------------------------------------------------- replies that do not come as asked


def test_a_client_that_raises_is_named_with_its_reason():
    class Raises(Linear):
        def train(self, arrays: Any) -> Any:
            raise FileNotFoundError("the camera is unplugged")

    population = clients(5)
    population[BAD] = Raises(BAD)
    strategy = ours()
    found = start(strategy, LocalGrid(population))
    for told in strategy.records:
        assert list(rejected(told)) == [BAD]
        assert "the camera is unplugged" in rejected(told)[BAD]
    assert bits(found.arrays) == expected(strategy)


def test_the_error_reply_of_a_killed_node_is_matched_to_its_client():
    """It comes from node 1, the SuperLink: only the message that it answers tells whose it is."""
    strategy = ours(nodes="auto")
    found = start(strategy, LocalGrid(clients(5), lost={BAD}, named=True, keyed=True))
    for told in strategy.records:
        (bad,) = rejected(told).items()
        assert bad[0] in (BAD, f"site-{BAD:02d}")
        assert "heartbeat" in bad[1]
    strategy = ours(nodes="partition-id")
    grid = LocalGrid(clients(5))
    grid.fails = lambda call, kind: grid.lost.update({BAD} if kind == "train" else ())
    found = start(strategy, grid)
    assert all(list(rejected(told)) == [BAD] for told in strategy.records)
    assert bits(found.arrays) == expected(strategy)


def test_a_client_that_hangs_costs_the_rounds_own_timeout(clock: Clock):
    strategy = ours(round_timeout=20.0, nodes="partition-id")
    grid = LocalGrid(clients(5))
    grid.fails = lambda call, kind: grid.never.update({BAD} if kind == "train" else ())
    begin = clock.now
    found = start(strategy, grid)
    assert 60 <= clock.now - begin <= 66  # three rounds, and not 3 × 3,600
    for told in strategy.records:
        assert list(rejected(told)) == [BAD]
        assert re.search(r"no reply (with)?in 20|timeout|20 s", rejected(told)[BAD])
    assert bits(found.arrays) == expected(strategy)


def test_without_an_own_timeout_starts_counts(clock: Clock):
    strategy = ours(nodes="id")
    grid = LocalGrid(clients(5), never={BAD})
    begin = clock.now
    start(strategy, grid, rounds=1, timeout=100.0)
    assert 100 <= clock.now - begin <= 110
    assert len(rejected(strategy.records[0])) == 1


def test_one_that_hangs_in_evaluation_is_not_waited_for_longer(clock: Clock):
    strategy = FedGLAD(round_timeout=20.0, nodes="id")
    grid = LocalGrid(clients(5))
    grid.fails = lambda call, kind: (
        grid.never.update({BAD}) if kind == "evaluate" else grid.never.clear()
    )
    begin = clock.now
    found = start(strategy, grid, rounds=2)
    assert 40 <= clock.now - begin <= 44
    assert list(found.evaluate_metrics_clientapp) == [1, 2]
    assert all(rejected(told) == {} for told in strategy.records)


def test_waiting_is_neither_hectic_nor_slow(clock: Clock):
    """A reply after a minute is fetched within seconds, with fewer polls than ten a second."""
    strategy = ours(nodes="id")
    grid = LocalGrid(clients(3), never={1})
    begin = clock.now
    clock.on_nap = lambda: grid.never.clear() if clock.now - begin > 60 else None
    start(strategy, grid, rounds=1)
    assert clock.now - begin <= 66
    assert len(clock.naps) < 600
    assert clock.naps[0] <= 0.2


def test_who_answers_twice_counts_once():
    strategy = ours(nodes="partition-id")
    grid = LocalGrid(clients(5))
    grid.fails = lambda call, kind: grid.twice.update({BAD} if kind == "train" else ())
    found = start(strategy, grid)
    assert all(sorted(who(told)) == [0, 1, 2, 3, 4] for told in strategy.records)
    assert bits(found.arrays) == expected(strategy)


def test_a_reply_of_another_kind_is_left_out():
    """A client that answers `train` with a query's answer, or sends back the message it got."""

    class Echo(Linear):
        def __call__(self, message: Message, context: Context) -> Message:
            if message.metadata.message_type == "train":
                return Message(message.content, reply_to=message)
            return super().__call__(message, context)

    population = clients(5)
    population[BAD] = Echo(BAD)
    strategy = ours()
    found = start(strategy, LocalGrid(population))
    assert all(list(rejected(told)) == [BAD] for told in strategy.records)
    assert bits(found.arrays) == expected(strategy)


def test_the_superlink_that_is_gone_ends_the_run_with_its_error():
    for call in ("push", "pull"):
        grid = LocalGrid(clients(5))

        def fail(found: str, kind: str, call: str = call, grid: LocalGrid = grid) -> None:
            if found == call and kind == "train" and len(grid.asked()) > 7:
                raise ConnectionError("connection refused")

        grid.fails = fail
        with pytest.raises(ConnectionError, match="connection refused"):
            start(ours(), grid)


# ---------------------------------------------------------------------------------- too few replies


class Sick(Linear):
    """Raises in the given rounds (None: in all)."""

    rounds: tuple[int, ...] | None = None

    def __call__(self, message: Message, context: Context) -> Message:
        training = message.metadata.message_type == "train"
        if training and (self.rounds is None or server_round(message) in self.rounds):
            raise RuntimeError("out of memory")
        return super().__call__(message, context)


def sick(count: int, *rounds: int) -> list[Linear]:
    found = [Sick(index) for index in range(count)]
    for own in found:
        own.rounds = rounds or None
    return [*found]


def test_if_all_clients_fail_the_run_fails(said: Callable[[], str]):
    theirs = start(flowers(), LocalGrid(sick(4)))
    assert dict(theirs.arrays) == {}  # and it is reported as completed
    strategy = ours()
    with pytest.raises(NothingTrained, match=r"(?s)3 rounds.*out of memory"):
        start(strategy, LocalGrid(sick(4)))
    assert [told["status"] for told in strategy.records] == ["skipped"] * 3
    assert issubclass(NothingTrained, RuntimeError)


def test_a_round_without_replies_is_skipped_and_said(said: Callable[[], str]):
    strategy = ours()
    found = start(strategy, LocalGrid(sick(4, 2)))
    assert [told["status"] for told in strategy.records] == ["stepped", "skipped", "stepped"]
    assert "out of memory" in strategy.records[1]["reason"]
    assert strategy.records[1]["attempts"] == 3
    assert re.search(r"2 of 3 rounds trained|1 of 3 rounds .*skipped", said())
    population = clients(4)
    assert bits(found.arrays) == expected(strategy, population)


def test_another_cohort_is_tried_without_those_that_failed():
    """Six clients, two a round, four of them sick: the third try at the latest finds a good one."""
    population = [*sick(4), *clients(6)[4:]]
    for seed in range(4):
        grid = LocalGrid(population)
        strategy = ours(sampler=Uniform(clients_per_round=2, seed=seed), nodes="partition-id")
        start(strategy, grid, rounds=1)
        (told,) = strategy.records
        assert told["status"] == "stepped"
        assert len(grid.asked()) == len(set(grid.asked())) == 2 * told["attempts"]


def test_min_clients_is_the_least_that_will_do():
    population = [*sick(2), *clients(5)[2:]]
    strategy = ours(min_clients=4, retries=0)
    with pytest.raises(NothingTrained):
        start(strategy, LocalGrid(population), rounds=1)
    assert strategy.records[0]["attempts"] == 1
    assert "3 of 5" in strategy.records[0]["reason"]
    strategy = ours(min_clients=3, retries=0)
    start(strategy, LocalGrid(population), rounds=1)
    assert strategy.records[0]["status"] == "stepped"


def test_everybody_failed_so_they_are_asked_again():
    """With nobody else left, the retry goes to the same clients; some answer this time."""
    asked: list[int] = []

    class Shaky(Linear):
        def train(self, arrays: Any) -> Any:
            asked.append(self.partition)
            if len(asked) <= 3:
                raise RuntimeError("try again")
            return super().train(arrays)

    strategy = ours()
    start(strategy, LocalGrid([Shaky(k) for k in range(3)]), rounds=1)
    (told,) = strategy.records
    assert (told["status"], told["attempts"]) == ("stepped", 2)
    assert len(asked) == 6
    assert rejected(told) == {}


def test_the_summary_before_the_run_says_how_it_is_set_up(said: Callable[[], str]):
    ours(optimizer=SGD(lr=0.25)).summary()
    assert "SGD(lr=0.25" in said()
    assert "Glad(" in said()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("name", ["seen", "norm.num_batches_tracked", "norm.running_var"])
def test_buffers_of_every_unsigned_type(name: str, dtype: Any):
    """torch cannot compare those of 16 bits and more."""

    class Counts(Linear):
        def train(self, arrays: Any) -> Any:
            moved = super().train({key: arrays[key] for key in ("weight", "bias")})
            return {**moved, name: (arrays[name] + 1).astype(dtype)}

    strategy = ours()
    start_with = record({**model(), name: np.array([1, 7], dtype)})
    found = strategy.start(LocalGrid([Counts(k) for k in range(3)]), start_with, num_rounds=2)
    assert all(rejected(told) == {} for told in strategy.records)
    assert numpy(found.arrays)[name].tolist() == [3, 9]
    assert numpy(found.arrays)[name].dtype == dtype


@pytest.mark.parametrize("place", range(3))
def test_nan_with_a_huge_weight_costs_no_attempt(place: int):
    def spoil(arrays: dict[str, Any], metrics: dict[str, Any]) -> None:
        arrays["weight"] = nan_entry(arrays["weight"])
        metrics["num-examples"] = 10**9

    population = clients(3)
    population[place] = Faulty(place, spoil)
    strategy = ours()
    start(strategy, LocalGrid(population))
    for told in strategy.records:
        assert (told["status"], told["attempts"]) == ("stepped", 1)
        assert list(rejected(told)) == [place]
