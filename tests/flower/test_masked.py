"""Masked updates on Flower: the model is that of plain updates, and the server sees only sums."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedglad.adapters import Adapter, Pooled
from fedglad.estimators import MIFA
from fedglad.filters import Krum
from fedglad.flower import FedGLAD, NothingTrained, SecureSum, secure_sum
from fedglad.flower.masking import SECURE, VECTOR
from fedglad.optimizers import Adam
from fedglad.samplers.adafl import AdaFL
from fedglad.samplers.uniform import Uniform
from fedglad.weights import Equal

from .grid import Client, Clock, Linear, LocalGrid, Normed, bits, clients, model, numpy, record


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", found)
    return found


def masked(client: Client) -> Client:
    """A client whose app has the mod."""
    app = ClientApp()
    app.train(mods=[secure_sum])(client)
    app.evaluate()(client)
    app.query("fedglad")(client)
    return app


class Spy(LocalGrid):
    """Keeps what comes back of each kind of message, and lets nodes go at a stage."""

    def __post_init__(self) -> None:
        self.replies: list[Message] = []
        self.leaves: dict[int, str] = {}
        self.told: list[dict[str, Any]] = []
        super().__post_init__()

    def _answer(self, number: str, message: Message) -> list[Message]:
        node = self.nodes[message.metadata.dst_node_id]
        asked = dict(message.content.get(SECURE, {}))
        self.told.append(asked)
        if asked and self.leaves.get(node.index) == asked["stage"]:
            self.lost.add(node.index)
        replies = super()._answer(number, message)
        self.replies += replies
        return replies


def run(
    found: list[Any],
    report: Any = "updates",
    rounds: int = 3,
    *,
    normed: bool = False,
    leaves: dict[int, str] | None = None,
    **settings: Any,
) -> tuple[FedGLAD, dict[str, np.ndarray], Spy]:
    grid = Spy(found if report == "updates" else [masked(c) for c in found], salt=5)
    grid.leaves = leaves or {}
    known: dict[str, Any] = {"fraction_evaluate": 0.0, "on_short": "skip", "retries": 0, "seed": 3}
    known |= {"nodes": "partition-id", **settings}
    strategy = FedGLAD(report=report, **known)
    result = strategy.start(grid, record(model(normed=normed)), rounds, timeout=60.0)
    assert result.arrays is not None
    return strategy, numpy(result.arrays), grid


SETTINGS: dict[str, dict[str, Any]] = {
    "glad": {},
    "average": {"adapter": None},
    "adam": {"optimizer": Adam(lr=0.05)},
    "pooled": {"adapter": Pooled()},
    "equal": {"weighting": Equal()},
    "sampled": {"sampler": Uniform(clients_per_round=4, seed="run")},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_model_is_that_of_plain_updates(name: str):
    plain, expected, _ = run(clients(6), **SETTINGS[name])
    secure, found, grid = run(clients(6), "secure", **SETTINGS[name])
    for tensor in expected:
        # Of each of 6 clients w·g is off by 2^-33 at most: over Σw, that is below float32's step.
        assert np.allclose(found[tensor], expected[tensor], rtol=0, atol=2e-6), tensor
    for a, b in zip(plain.records, secure.records, strict=True):
        assert b["status"] == "stepped"
        assert b["gsi_all"] == pytest.approx(a["gsi_all"], rel=1e-5)
        assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-5)
        assert [c["id"] for c in b["clients"]] == [c["id"] for c in a["clients"]]
        for group, values in a["groups"].items():
            assert b["groups"][group]["scale"] == pytest.approx(values["scale"], rel=1e-5)
    assert not any(SECURE in node.context.state for node in grid.nodes.values()), "secrets are kept"


def test_the_user_s_function_is_called_once_a_round_with_a_plain_message():
    calls: list[list[str]] = []

    class Counting(Linear):
        def __call__(self, message: Message, context: Context) -> Message:
            if message.metadata.message_type == "train":
                calls.append([*message.content])
            return super().__call__(message, context)

    run([Counting(k) for k in range(4)], "secure", rounds=2)
    assert calls == [["arrays", "config"]] * 8


def test_nothing_but_the_protocol_leaves_a_client():
    _, _, grid = run(clients(4), "secure", rounds=1)
    sent = [reply for reply in grid.replies if reply.metadata.message_type == "train"]
    assert len(sent) == 4 * 4
    for reply in sent:
        assert {*reply.content} <= {SECURE, VECTOR}
        assert not reply.content.metric_records
    vectors = [vector(reply) for reply in sent if VECTOR in reply.content]
    assert [v.dtype for v in vectors] == [np.uint64] * 4
    # 8 elements each, of less than 2^40 in magnitude if they were not masked.
    assert np.mean([np.abs(v.view(np.int64)) > 2.0**50 for v in vectors]) > 0.9


def vector(reply: Message) -> np.ndarray:
    return reply.content.array_records[VECTOR][VECTOR].numpy()


def test_records_say_nothing_of_single_clients():
    strategy, _, _ = run(clients(4), "secure", rounds=2)
    for line in strategy.records:
        assert [set(c) for c in line["clients"]] == [{"id", "weight", "loss", "sq_norm"}] * 4
        assert {v for c in line["clients"] for k, v in c.items() if k != "id"} == {None}
        assert line["metrics"]["train"] == {"train_loss": line["train_loss"]}


@pytest.mark.parametrize("stage", ["keys", "shares", "masked", "unmask"])
def test_a_node_that_goes_at_a_stage(stage: str):
    # t of 5 at 2/3 is 4. Who goes while the masks are taken off is in the sum already.
    strategy, found, _ = run(clients(5), "secure", rounds=1, leaves={2: stage})
    stays = [c for k, c in enumerate(clients(5)) if k != 2 or stage == "unmask"]
    _, expected, _ = run(stays, rounds=1)
    assert all(np.allclose(found[n], expected[n], rtol=0, atol=2e-6) for n in found)
    rejected = {c["id"]: c.get("rejected") for c in strategy.records[0]["clients"]}
    assert rejected.keys() == set(range(5))
    left = {k: why for k, why in rejected.items() if why}
    if stage == "unmask":
        assert not left
    else:
        assert left == {2: "the client failed: The node did not send a heartbeat"}


@pytest.mark.parametrize("stage", ["keys", "shares", "masked", "unmask"])
def test_with_too_few_the_round_is_skipped_and_the_next_goes_on(stage: str):
    strategy, _, grid = run(
        clients(5),
        "secure",
        rounds=2,
        leaves={1: stage, 2: stage},
        max_skipped=1.0,
        quarantine=0,
        min_available_nodes=2,
        sampler=OddThenEven(clients_per_round=5),
    )
    first, second = strategy.records
    assert (first["status"], second["status"]) == ("skipped", "stepped")
    assert first["reason"].startswith("3 of 5 clients ")
    assert "4 are needed to see a sum" in first["reason"]
    assert len(second["clients"]) == 3
    assert not any(SECURE in n.context.state for n in grid.nodes.values() if n.index in (0, 3, 4))


class OddThenEven(Uniform):
    """All five, then those that stay."""

    def draw(self, rng: Any, t: int, state: Any, pool: Any, ask: Any) -> Any:
        from fedglad.samplers.base import Cohort

        return Cohort((0, 1, 2, 3, 4) if t == 0 else (0, 3, 4))


def test_an_attempt_that_fails_is_followed_by_another():
    # Two of five go in the first attempt; in the second they are avoided, and 3 of 3 stay.
    strategy, _, _ = run(
        clients(5), "secure", rounds=1, leaves={1: "shares", 2: "shares"}, retries=1
    )
    (line,) = strategy.records
    assert line["status"] == "stepped"
    assert line["attempts"] == 2
    assert "3 of 5 clients sent shares" in line["retried"][0]


def test_buffers_are_means():
    _, expected, _ = run(clients(4, Normed), normed=True, rounds=2)
    _, found, _ = run(clients(4, Normed), "secure", normed=True, rounds=2)
    counter = "norm.num_batches_tracked"
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        if name != counter:
            assert np.allclose(found[name], expected[name], rtol=0, atol=2e-6), name
    # 1 + k more in each client k, weights 8, 13, 18, 23: Σw(1 + k)/Σw = 180/62, that is 3 a round.
    # Plain rounds take the maximum, 4 a round.
    assert found[counter] == 6
    assert expected[counter] == 8


def test_with_fewer_than_min_clients_no_sum_is_seen():
    # 4 of 5 would do for the threshold, and not for `min_clients`: nobody is asked to unmask.
    settings: dict[str, Any] = {"min_clients": 5, "max_skipped": 1.0}
    with pytest.raises(NothingTrained, match="4 of 5 clients sent a vector, 5 are needed"):
        run(clients(5), "secure", rounds=1, leaves={2: "masked"}, **settings)
    with pytest.raises(NothingTrained, match="4 clients take part, 5 are needed"):
        run(clients(4), "secure", rounds=1, **settings)


def test_the_threshold_is_that_of_the_strategy():
    _, _, grid = run(
        clients(5), SecureSum(threshold=0.5), rounds=1, leaves={1: "shares", 2: "masked"}
    )
    assert grid.lost == {1, 2}
    assert [told["threshold"] for told in grid.told if told.get("stage") == "keys"] == [3] * 5


def test_a_resumed_run_goes_on(tmp_path):
    settings = {"checkpoint_dir": tmp_path / "run"}
    _, expected, _ = run(clients(4), "secure", rounds=4)
    run(clients(4), "secure", rounds=2, **settings)
    strategy, found, _ = run(clients(4), "secure", rounds=4, resume=True, **settings)
    assert len(strategy.records) == 4
    # The masks were others, and nothing is left of them: the same bits.
    assert bits(found) == bits(expected)
    assert 'report = "secure"' in (tmp_path / "run" / "config.toml").read_text()


class Watching(Uniform):
    """Looks at each round's record."""

    def observe(self, state: Any, record: Any) -> Any:
        return state


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "krum": ({"filter": Krum(), "adapter": None}, "Krum compares the updates with each other"),
    "estimator": ({"estimator": MIFA(), "adapter": Adapter()}, "MIFA remembers single updates"),
    "adafl": ({"sampler": AdaFL(clients_per_round=3)}, "distances=True measures every update"),
    "watcher": ({"sampler": Watching(clients_per_round=3)}, "Watching looks at what single"),
    "report": ({"report": "sums"}, "choose updates, norms or secure"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_single_updates_is_refused(name: str):
    settings, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        run(clients(5), settings.pop("report", "secure"), **settings)


class Bad(Linear):
    """Replies with something that cannot be summed."""

    kind = "nan"

    def __call__(self, message: Message, context: Context) -> Message:
        reply = super().__call__(message, context)
        if message.metadata.message_type != "train":
            return reply
        if self.kind == "error":
            return Message(Error(1, "no data today"), reply_to=message)
        if self.kind == "raises":
            raise RuntimeError("out of memory")
        arrays = numpy(reply.content.array_records["arrays"])
        metrics: dict[str, Any] = dict(reply.content.metric_records["metrics"])
        match self.kind:
            case "nan":
                arrays["weight"] = arrays["weight"] * np.nan
            case "huge":
                arrays["weight"] = arrays["weight"] + np.float32(1e9)
            case "shape":
                arrays["bias"] = arrays["bias"][:1]
            case "names":
                del arrays["bias"]
            case "integers":
                arrays["bias"] = arrays["bias"].astype(np.int64)
            case "weightless":
                del metrics["num-examples"]
            case "negative":
                metrics["num-examples"] = -3
            case _:
                raise AssertionError(self.kind)
        content: dict[str, Any] = {"arrays": record(arrays), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)


WRONG = {
    "nan": "'weight' has NaN or inf",
    "huge": "'weight' has a value of 1.8e+10, weight included",
    "shape": "'bias' has the shape (1,), not (2,)",
    "names": "what was sent and what was trained differ in 'bias'",
    "integers": "'bias' is int64, not float32",
    "weightless": "the MetricRecord has no number 'num-examples'",
    "negative": "the weight is -3.0, not a positive finite number",
    "error": "no data today",
    "raises": "out of memory",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_client_that_cannot_be_summed_is_left_out_with_the_reason(kind: str):
    bad = Bad(2)
    bad.kind = kind
    found = [*clients(2), bad, *(Linear(k) for k in (3, 4))]
    strategy, arrays, grid = run(found, "secure", rounds=1)
    assert not any(SECURE in node.context.state for node in grid.nodes.values()), "secrets are kept"
    entries = {c["id"]: c.get("rejected") for c in strategy.records[0]["clients"]}
    assert WRONG[kind] in str(entries.pop(2))
    assert entries == {0: None, 1: None, 3: None, 4: None}
    _, expected, _ = run([c for c in found if c is not bad], rounds=1)
    assert all(np.allclose(arrays[n], expected[n], rtol=0, atol=2e-6) for n in arrays)


def test_a_client_without_the_mod_is_left_out():
    grid = Spy([*(masked(c) for c in clients(4)), Linear(4)], salt=5)
    strategy = FedGLAD(report="secure", fraction_evaluate=0.0, on_short="skip", retries=0)
    strategy.start(grid, record(model()), 1, timeout=60.0)
    (line,) = strategy.records
    assert line["status"] == "stepped"
    (why,) = (c["rejected"] for c in line["clients"] if "rejected" in c)
    assert why.startswith("the client failed: ValueError: ")


def test_a_client_with_the_mod_gives_no_plain_update():
    grid = Spy([masked(c) for c in clients(3)], salt=5)
    strategy = FedGLAD(fraction_evaluate=0.0, on_short="skip", retries=0)
    with pytest.raises(RuntimeError, match="leave it masked or not at all"):
        strategy.start(grid, record(model()), 1, timeout=60.0)
    assert not any(
        VECTOR in r.content or r.content.array_records for r in grid.replies if r.has_content()
    )


def test_the_snippets_on_the_page_on_privacy():
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text("utf-8")
    section = page.split("## Secure aggregation")[1].split("\n## ")[0]
    server, client = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    LocalGrid([])  # Flower's Message asks whose it is
    scope: dict[str, Any] = {}
    exec(server, scope)
    assert scope["strategy"].secure == SecureSum(threshold=0.5, fraction=32)
    exec(client, scope)
    message = Message(RecordDict({"arrays": record(model())}), 1, "train")
    context = Context(1, 1, {}, RecordDict(), {})
    assert "leave it masked or not at all" in scope["app"](message, context).error.reason


def test_the_mod_needs_no_torch():
    script = """
import sys
sys.modules["torch"] = None
from fedglad.flower import secure_sum
assert not [name for name in sys.modules if name.partition(".")[0] == "flwr"]
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_flower_s_own_loop_masks_too():
    from flwr.serverapp.strategy import Strategy

    grid = Spy([masked(c) for c in clients(4)], salt=5)
    strategy = FedGLAD(report="secure", fraction_evaluate=0.0)
    result = Strategy.start(strategy, grid, record(model()), 2)
    _, expected, _ = run(clients(4), rounds=2)
    found = numpy(result.arrays)
    assert all(np.allclose(found[n], expected[n], rtol=0, atol=2e-6) for n in found)
