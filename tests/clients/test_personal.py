"""Parameters that stay with each client, and models of its own: kept, tested, refused."""

import json
import os
import signal
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_support import outcome, tiny_data
from runs.test_runs import stopped
from torch import Tensor, nn

from fedglad import adapters, optimizers
from fedglad.analysis import frames
from fedglad.analysis.comparison import compare
from fedglad.config.schema import ConfigError, load
from fedglad.core import checkpoint
from fedglad.data import from_arrays
from fedglad.records import ClientScores, Score
from fedglad.report.figures import run as figures
from fedglad.runs import Run, evaluate, execute
from fedglad.simulation.engines.base import Worker
from fedglad.simulation.simulation import Simulation

HERE = "clients.test_personal"
SIZES = (20, 33, 8, 50, 12, 27)
GIVEN: dict[str, Any] = {
    "rounds": 3,
    "model.name": f"{HERE}:normed",
    "data.name": f"{HERE}:data",
    "data.validation": 0.2,
    "eval_clients": "all",
    "eval_clients_every": 1,
    "client.batch_size": 8,
    "client.drop_last": True,
    "client.lr": 0.05,
    "sampler.clients_per_round": 4,
    "checkpoint_every": 2,
    "engine.name": "serial",
}
METHODS: dict[str, dict[str, Any]] = {
    "moon": {},
    "fedsam": {},
    "fedbn": {},
    "fedrep": {"client.head_epochs": 1},
    "ditto": {},
    "scaffold": {"client.personal": "4.*, *.running_*", "client.optimizer": "sgd"},
}
LOCAL: dict[str, Any] = {"engine.name": "local", "engine.workers": 2}
WHOLE = 64 * 12 + 12 + 12 + 12 + 12 * 10 + 10  # parameters
HEAD = 12 * 10 + 10


def normed() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def data() -> Any:
    return tiny_data(*SIZES)


def given(method: str, **more: Any) -> dict[str, Any]:
    named = {key.replace("__", "."): value for key, value in more.items()}
    return {**GIVEN, "client.name": method, **METHODS.get(method, {}), **named}


def simulation(method: str, **more: Any) -> Simulation:
    return Simulation(load("digits", given(method, **more))[1].plan())


def memories(found: Simulation) -> list[dict[str, Tensor]]:
    store = found.memories
    assert store
    return [store.read(k, store.version(k)) for k in range(found.parts.data.clients)]


def kept(folder: Path) -> dict[str, Any]:
    """Every file of the clients' memories, as numbers."""
    return {
        path.name: {name: value.tolist() for name, value in checkpoint.read(path)[0].items()}
        for path in sorted((folder / "memories").rglob("*.safetensors"))
    }


# ------------------------------------------------------------------------------ resume, engines


@pytest.mark.parametrize("method", METHODS)
def test_a_run_in_processes_that_was_stopped_goes_on_to_the_same_bits(method: str, tmp_path: Path):
    """Against one that was never stopped, in this process: records, scores, memories, models."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    execute("run", load("digits", given(method))[1], out=whole, keep_state=True)
    config = load("digits", given(method, **LOCAL))[1]
    stopped(broken, after=2, config=config)
    execute("run", config, out=broken, resume=True, keep_state=True)
    assert outcome(broken) == outcome(whole)
    assert kept(broken) == kept(whole)
    assert bool(kept(whole)) == (method != "fedsam")


def test_without_being_asked_a_finished_run_keeps_its_clients_own_models_alone(tmp_path: Path):
    for method, there in {"ditto": True, "fedrep": True, "moon": False}.items():
        execute("run", load("digits", given(method))[1], out=tmp_path / method)
        assert bool(kept(tmp_path / method)) == there, method


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["serial", "local"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(method: str, engine: str, tmp_path: Path):
    named = LOCAL if engine == "local" else {}
    config = load("digits", given(method, rounds=4, **named))[1]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    execute("run", config, out=whole, keep_state=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if not child:
        try:
            kill = lambda done: os.kill(os.getpid(), signal.SIGKILL) if done.t == 2 else None  # noqa: E731
            execute("run", config, out=broken, keep_state=True, on_round=kill)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    execute("run", config, out=broken, resume=True, keep_state=True)
    assert outcome(broken) == outcome(whole)
    assert kept(broken) == kept(whole)


# ------------------------------------------------------------------------------ what is kept


def test_only_what_is_personal_is_on_the_disk(tmp_path: Path):
    run = execute("run", load("digits", given("fedrep"))[1], out=tmp_path / "run")
    files = kept(run.folder)
    assert files
    for tensors in files.values():
        assert {name: np.size(value) for name, value in tensors.items()} == {
            "personal/4.weight": 120,
            "personal/4.bias": 10,
        }


RULES = [("server", name) for name in optimizers.REGISTRY]
RULES += [("adapter", name) for name in adapters.REGISTRY]


@pytest.mark.parametrize(("section", "name"), RULES)
def test_what_is_personal_does_not_move_at_the_server(section: str, name: str):
    more: dict[str, Any] = {f"{section}__name": name, "eval_clients": 0}
    with closing(simulation("fedbn", **more)) as found:
        before = {name: value.clone() for name, value in found.server.state.items()}
        list(found.rounds())
        moved = {n for n, value in found.server.state.items() if not value.equal(before[n])}
        assert moved
        assert not [part for part in moved if part.startswith("2.")]
        own = [memory["personal/2.running_mean"] for memory in memories(found) if memory]
        assert len(own) > 3
        assert not any(one.equal(before["2.running_mean"]) for one in own)


def test_what_a_client_receives_and_sends_is_less():
    def bytes_of(method: str, **more: Any) -> dict[str, int]:
        with closing(simulation(method, **more)) as found:
            return found.update_bytes

    buffers = 2 * 12 * 4 + 8
    both = 4 * WHOLE + buffers
    assert bytes_of("plain") == {"down": both, "up": both}
    shared = 4 * (WHOLE - HEAD)
    assert bytes_of("fedrep") == {"down": shared + buffers, "up": shared + buffers}
    assert bytes_of("fedbn") == dict.fromkeys(("down", "up"), 4 * (WHOLE - 24))
    # Scaffold hears c and sends Δc: of what is shared alone.
    scaffold = bytes_of("scaffold", client__personal="4.*")
    assert scaffold == dict.fromkeys(("down", "up"), 2 * shared + buffers)


@pytest.mark.parametrize("method", ["fedrep", "ditto", "moon", "scaffold"])
def test_of_a_shortened_update_the_clients_own_is_kept_whole(method: str):
    """The filter cuts every update to a thousandth, and of SCAFFOLD's c_k it keeps as much."""
    found: list[list[dict[str, Tensor]]] = []
    norms: list[float] = []
    for cut in ({}, {"filter__name": "norm-clip", "filter__max_norm": 1e-3}):
        with closing(simulation(method, rounds=1, adapter__name="none", **cut)) as run:
            (done,) = run.rounds()
            shares = [client.get("clipped", 1.0) for client in done.record.clients]
            norms.append(max(shares))
            found.append(memories(run))
    assert norms[0] == 1.0
    assert norms[1] < 0.1
    whole, after = found
    for one, other in zip(whole, after, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if name == "c_k":
                assert 0 < other[name].norm() < 0.1 * value.norm()
            else:
                assert other[name].equal(value), name


class Bad:
    """Client 2 has NaN among its samples, in every round."""

    clients = len(SIZES)

    def __init__(self) -> None:
        self.inner = data()

    def size(self, k: int) -> int:
        return self.inner.size(k)

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        x, y = self.inner.client(k)
        return (x * torch.nan if k == 2 else x), y

    def test(self) -> tuple[Tensor, Tensor]:
        return self.inner.test()


@pytest.mark.parametrize("method", ["fedbn", "fedrep", "ditto", "moon"])
def test_a_rejected_client_keeps_what_it_had(method: str):
    named = given(method, sampler__clients_per_round=len(SIZES), rounds=2)
    named = {key: value for key, value in named.items() if "eval_clients" not in key}
    named.pop("data.validation")
    plan = load("digits", {**named, "data.name": "digits"})[1].plan(model=normed(), data=Bad())
    with closing(Simulation(plan)) as found:
        for done in found.rounds():
            assert list(done.record.rejected) == [2]
        assert found.memories
        versions = [found.memories.version(k) for k in range(len(SIZES))]
        assert versions == [2, 2, 0, 2, 2, 2]


# ----------------------------------------------------------------------------------- testing


@pytest.mark.parametrize("method", ["fedrep", "fedbn", "ditto"])
def test_each_client_is_tested_with_its_own_model(method: str):
    """Put together by hand of the server's tensors and those in its memory."""
    with closing(simulation(method)) as found:
        *_, last = found.rounds()
        assert last.client_scores
        assert last.client_scores.model == "personal"
        state, held = found.server.state, memories(found)
        layout = found.server.layout
        model = normed()
        for k, score in zip(last.client_scores.ids, last.client_scores.scores, strict=True):
            own = dict(state)
            for name, value in held[k].items():
                if name == "own":
                    own |= layout.views(value)
                else:
                    own[name.partition("/")[2]] = value
            model.load_state_dict(own)
            x, y = found.parts.data.client_test(k)  # type: ignore[attr-defined]
            with torch.no_grad():
                right = (model.eval()(x).argmax(dim=1) == y).double().mean().item()
            assert score == pytest.approx(right), k
        model.load_state_dict(state)
        x, y = found.parts.data.test()
        with torch.no_grad():
            right = (model.eval()(x).argmax(dim=1) == y).double().mean().item()
        assert last.test_accuracy == pytest.approx(right)  # of the server's model


def test_a_sampler_that_asks_for_losses_is_told_those_of_the_clients_own_models():
    with closing(simulation("fedrep")) as found:
        list(found.rounds())
        held = memories(found)
        k = next(k for k, memory in enumerate(held) if memory)
        (loss,) = found.engine.losses([k], found.server.packed)
        model = normed()
        personal = {n.removeprefix("personal/"): v for n, v in held[k].items()}
        model.load_state_dict({**found.server.state, **personal})
        x, y = found.parts.data.client(k)
        with torch.no_grad():
            wanted = nn.functional.cross_entropy(model.eval()(x), y).item()
        assert loss == pytest.approx(wanted, rel=1e-5)


def test_records_and_summary_say_whose_model_it_was(tmp_path: Path):
    for method, model in {"ditto": "personal", "fedbn": "personal", "moon": None}.items():
        folder = tmp_path / method
        run = execute("run", load("digits", given(method, rounds=1))[1], out=folder)
        (line,) = run.rounds()
        assert line["client_scores"].get("model") == model
        assert run.summary
        assert run.summary.get("last_client_model") == model
        (raw,) = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
        assert raw["client_scores"].get("model") == model
        assert Run(folder).summary == run.summary
        # and so does what is made of them
        noted = any("of their own models" in note for note in figures(run.read())["missing"])
        assert noted == bool(model)
        frame: Any = frames.client_scores([run.read()], named=False)
        assert frame["model"].unique().tolist() == [model or "server"]
        (row,) = (one for one in compare([folder]).groups if one.averaged_of is None)
        assert row.clients
        assert row.clients.personal == bool(model)
        assert bool(evaluate(folder, trust_code=True).note) == bool(model)
    assert "model" not in ClientScores(Score(), (1,), (0.5,)).to_dict()


def shifted(clients: int = 6, n: int = 40, features: int = 8) -> Any:
    """One rule for all, y = [first feature > 0], of features that each client has scaled and
    shifted in a way of its own."""
    rng = np.random.default_rng(5)

    def samples(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(n, features)).astype(np.float32)
        return x, (x[:, 0] > 0).astype(np.int64)

    pairs, tests = [], []
    for _ in range(clients):
        scale = np.exp(rng.normal(size=features)).astype(np.float32)
        shift = (4 * rng.normal(size=features)).astype(np.float32)
        (x, y), (held_x, held_y) = samples(n), samples(n)
        pairs.append((x * scale + shift, y))
        tests.append((held_x * scale + shift, held_y))
    x, y = (np.concatenate(parts) for parts in zip(*tests, strict=True))
    made = from_arrays(pairs, test=(x, y))
    made.client_test = lambda k: tests[k]  # type: ignore[method-assign]
    return made


def test_fedbn_beats_fedavg_where_features_are_shifted():
    """On the clients' own held-out samples, of the same model, cohorts and batches."""

    def mean(method: str, adapter: str) -> float:
        settings = {
            **{"rounds": 15, "client.name": method, "adapter.name": adapter},
            **{"client.lr": 0.1, "client.batch_size": 10, "sampler.clients_per_round": 6},
            **{"eval_clients": "all", "eval_clients_every": 15, "engine.name": "serial"},
        }
        torch.manual_seed(2)
        model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))
        plan = load("digits", settings)[1].plan(model=model, data=shifted())
        with closing(Simulation(plan)) as found:
            *_, last = found.rounds()
        assert last.client_scores
        return last.client_scores.to_dict()["mean"]

    for adapter in ("none", "glad"):
        assert mean("fedbn", adapter) > 0.9
        assert mean("plain", adapter) < 0.75


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("method", "more", "said"),
    [
        ("plain", {"client__personal": "heads.*"}, r"'heads\.\*' matches no parameter .*1\.weight"),
        ("plain", {"client__personal": "4.*, heads"}, r"'heads' matches no parameter"),
        ("plain", {"client__personal": "*"}, r"Plain\(personal='\*'\) keeps every parameter"),
        ("fedrep", {"client__head": "*"}, r"FedRep keeps every parameter of the model"),
        (
            "fedbn",
            {"model__name": "mlp", "model__features": 64},
            r"FedBN\(norms='batch'\) found no .*client.norms=all",
        ),
    ],
)
def test_names_that_cannot_be_meant_are_refused_before_the_run(
    method: str, more: dict[str, Any], said: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=said):
        execute("run", load("digits", given(method, **more))[1], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("moon", "a loss of its own and a train of its own"),
        ("fedsam", "a step of its own"),
        ("fedbn", "personal parameters"),
        ("fedrep", "a train of its own and personal parameters"),
        ("ditto", "a train of its own"),
    ],
)
def test_the_batched_engine_refuses_what_it_cannot_do(method: str, what: str):
    with pytest.raises(ConfigError, match=rf"has {what}, and .*batched .*engine.name = local"):
        load("digits", {"client.name": method, "engine.name": "batched"})
    job = simulation(method).engine.worker.job  # type: ignore[attr-defined]
    batched = load("digits", {"engine.name": "batched"})[1].sections["engine"]
    with pytest.raises(ValueError, match=what):
        batched.start(job)


def test_the_batched_engine_still_corrects():
    load("digits", {"client.name": "scaffold", "engine.name": "batched"})
    with pytest.raises(ConfigError, match="personal parameters"):
        load("digits", {"client.personal": "*.bias", "engine.name": "batched"})


def test_one_gradient_leaves_nothing_to_keep():
    with pytest.raises(ConfigError, match=r"FedSGD\(personal='a'\): .*use plain for local steps"):
        load("digits", {"client.name": "fedsgd", "client.personal": "a"})


def test_a_run_whose_clients_are_not_tested_says_what_the_test_set_says(caplog: Any):
    with closing(simulation("fedrep", eval_clients=0)):
        assert "set eval_clients=all" in caplog.text
    caplog.clear()
    with closing(simulation("fedrep")), closing(simulation("ditto", eval_clients=0)):
        assert not caplog.text


@pytest.mark.parametrize("method", ["fedrep", "fedbn"])
def test_a_run_does_not_stop_by_a_model_without_what_is_personal(method: str):
    with pytest.raises(
        ConfigError, match=r"stop_after = 2 looks at the server's.* stay as they beg"
    ):
        load("digits", given(method, stop_after=2))[1].plan()
    load("digits", given("ditto", stop_after=2))[1].plan()  # whose server has a whole model


def test_a_worker_places_nothing_for_methods_without():
    """What every other method is tested with is the server's model, the very tensors."""
    with closing(simulation("scaffold", client__personal="")) as found:
        worker: Worker = found.engine.worker  # type: ignore[attr-defined]
        list(found.rounds())
        packed = found.server.packed
        assert worker._own(packed, 0, None, tested=True) is packed  # pyright: ignore[reportPrivateUsage]
