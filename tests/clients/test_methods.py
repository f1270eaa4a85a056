"""Client methods in whole runs: identities, what is remembered, every engine, refusals."""

from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import TINY, facts, outcome, play, tiny_data
from runs.test_runs import stopped
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad.clients import REGISTRY
from fedglad.config.schema import Config, ConfigError, find, load
from fedglad.runs import execute
from fedglad.simulation.simulation import Simulation

SIZES = (20, 33, 8, 50, 12, 27, 16, 41)
PLAIN_SGD = {"client.optimizer": "sgd"}
CLIENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fedsgd": {},
    "fedprox": {"client.mu": 0.5},
    "scaffold": {},
    "scaffold II": {"client.option": "II", **PLAIN_SGD},
    "feddyn": {"client.alpha": 0.5},
    "fednova": {},
    "vrl-sgd": {},
    "moon": {"client.mu": 0.5},
    "fedsam": {"client.rho": 0.2},
    "fedbn": {"client.norms": "all"},
    "fedrep": {"client.head_epochs": 2},
    "ditto": {"client.lam": 0.5},
    "plain personal": {"client.personal": "*.bias"},
}
"""Every row of the registry, and what of it is not the default."""

OPEN = ("moon", "fedsam", "fedbn", "fedrep", "ditto", "plain personal")
USUAL = [row for row in CLIENTS if row not in OPEN]

REMEMBERING = ["scaffold", "scaffold II", "feddyn", "vrl-sgd"]


def settings(row: str, **own: Any) -> dict[str, Any]:
    name = row.partition(" ")[0]
    # All that the preset would set for plain, and for no other.
    local = {"lr": 0.05, "batch_size": 8, "epochs": 1, "clip_norm": 0.0}
    if name == "fedsgd":
        local = {}
    if row in OPEN:
        local["drop_last"] = True  # there is no batch normalisation of one sample
    return {
        "rounds": 4,
        "sampler.clients_per_round": 5,
        "engine.name": "serial",
        "client.name": name,
        **{f"client.{key}": value for key, value in local.items()},
        **CLIENTS[row],
        **own,
    }


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(64, 10)


def normed() -> nn.Module:
    """With a layer that normalises, and one before the last."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 10)
    )


def run(row: str, *sizes: int, **own: Any) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    given = {key.replace("__", "."): value for key, value in own.items()}
    made = normed() if row in OPEN else model()
    return play(settings(row, **given), model=made, data=tiny_data(*(sizes or SIZES)))


@contextmanager
def simulation(row: str, *sizes: int, **own: Any) -> Generator[Simulation]:
    given = {key.replace("__", "."): value for key, value in own.items()}
    plan = load("digits", settings(row, **given))[1]
    made = normed() if row in OPEN else model()
    with closing(Simulation(plan.plan(model=made, data=tiny_data(*(sizes or SIZES))))) as found:
        yield found


def memories(found: Simulation, name: str) -> Tensor:
    """A row for every client; zeros for one that has not been asked yet."""
    store, zeros = found.memories, torch.zeros_like(found.server.packed[0])
    assert store
    held = [store.read(k, store.version(k)) for k in range(found.parts.data.clients)]
    return torch.stack([own.get(name, zeros) for own in held])


def close(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            torch.tensor(found[name]), torch.tensor(value), rtol=0, atol=tolerance
        )


# ------------------------------------------------------------------------------------ every row


def test_these_are_all_the_rows():
    assert {row.partition(" ")[0] for row in CLIENTS} == set(REGISTRY)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_row_says_what_it_is_and_where_it_is_from(name: str):
    said = find("client", name).__doc__
    assert said
    assert said.splitlines()[0].endswith(".")
    assert "arXiv:" in said


@pytest.mark.parametrize("row", CLIENTS)
def test_a_run_learns_and_repeats(row: str):
    rounds, state = run(row)
    assert all(found["status"] == "stepped" for found in rounds)
    assert not [c for found in rounds for c in found["clients"] if "rejected" in c]
    tested = "train_loss" if row in OPEN else "test_loss"  # of the server's model, or the clients'
    assert rounds[-1][tested] < rounds[0][tested]
    assert run(row) == (rounds, state)


@pytest.mark.parametrize("row", USUAL)
def test_the_batched_engine_agrees(row: str):
    rounds, state = run(row)
    others, found = run(row, engine__name="batched")
    close(found, state, 1e-4)
    for one, other in zip(rounds, others, strict=True):
        assert other["test_loss"] == pytest.approx(one["test_loss"], abs=1e-3)
        assert other["gsi_all"] == pytest.approx(one["gsi_all"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("row", CLIENTS)
def test_the_pool_of_processes_gives_the_same_bits(row: str):
    assert run(row, engine__name="local", engine__workers=2) == run(row)


@pytest.mark.parametrize("row", REMEMBERING)
def test_the_batched_engine_remembers_the_same(row: str):
    held: list[Tensor] = []
    for engine in ("serial", "batched"):
        with simulation(row, engine__name=engine) as found:
            list(found.rounds())
            held.append(memories(found, found.parts.client.remembers[0]))
    assert held[0].abs().max() > 1e-3
    torch.testing.assert_close(*held, rtol=0, atol=1e-4)


@pytest.mark.parametrize("row", CLIENTS)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(row: str, tmp_path: Path):
    own = {key: value for key, value in TINY.items() if key != "client.epochs"}
    given = {**own, **settings(row, rounds=6, checkpoint_every=2)}
    if row in OPEN:
        del given["model.features"]
        given |= {"model.name": "clients.test_methods:normed", "data.validation": 0.2}
        given |= {"eval_clients": "all", "eval_clients_every": 3}
    config = load("digits", given)[1]
    execute("whole", config, out=tmp_path / "whole")
    stopped(tmp_path / "cut", after=4, config=config)
    execute("cut", config, out=tmp_path / "cut", resume=True)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("row", CLIENTS)
def test_a_configuration_goes_through_its_file(row: str, tmp_path: Path):
    config = load("digits", settings(row))[1]
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), "utf-8")
    assert load(path)[1] == config


# ----------------------------------------------------------------------------------- identities


def test_fedprox_without_a_pull_is_fedavg_bit_for_bit():
    assert run("fedprox", client__mu=0.0) == run("plain")
    assert run("fedprox", client__mu=0.1) != run("plain")


@pytest.mark.parametrize("optimizer", ["sgd", "sgdm", "adam", "adamw"])
def test_scaffold_begins_as_fedavg(optimizer: str):
    own = {"client__optimizer": optimizer, "client__clip_norm": 1.0}
    (first,), state = run("scaffold", rounds=1, **own)
    (plain,), same = run("plain", rounds=1, **own)
    assert state == same
    sizes, of_plain = (
        first.pop("bytes"),
        plain.pop("bytes"),
    )  # c goes out, and c_k⁺ − c_k comes back
    assert sizes == {way: 2 * size for way, size in of_plain.items()}
    assert first == plain
    assert run("scaffold", rounds=2, **own) != run("plain", rounds=2, **own)


def test_vrl_sgd_begins_as_fedavg():
    own = {"client__optimizer": "sgd"}
    (first,), state = run("vrl-sgd", rounds=1, **own)
    (plain,), same = run("plain", rounds=1, **own)
    assert state == same
    sizes, of_plain = first.pop("bytes"), plain.pop("bytes")  # the mean gradient comes back, too
    assert sizes == {"down": of_plain["down"], "up": 2 * of_plain["up"]}
    assert first == plain
    assert run("vrl-sgd", rounds=2, **own) != run("plain", rounds=2, **own)


def test_scaffolds_two_options_are_one_for_plain_sgd():
    close(run("scaffold", client__optimizer="sgd")[1], run("scaffold II")[1], 1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "sgdm"])
def test_fednova_with_equal_numbers_of_steps_is_fedavg(optimizer: str):
    by_number = {"client__optimizer": optimizer, "client__steps": 7}
    rounds, state = run("plain", **by_number)
    others, found = run("fednova", **by_number)
    close(found, state, 1e-6)
    for one, other in zip(rounds, others, strict=True):
        assert other["gsi_all"] == pytest.approx(one["gsi_all"], rel=1e-5)
        for name, sums in one["tensors"].items():
            assert other["tensors"][name] == pytest.approx(sums, rel=1e-4)
    by_epochs = {"client__optimizer": optimizer}
    assert run("fednova", **by_epochs)[1] != run("plain", **by_epochs)[1]


def test_fedsgd_with_all_clients_is_gradient_descent_on_all_samples():
    rounds, state = run(
        "fedsgd", sampler__clients_per_round=len(SIZES), server__lr=0.5, adapter__name="none"
    )
    data, own = tiny_data(*SIZES), model()
    x, y = (torch.cat(part) for part in zip(*map(data.client, range(len(SIZES))), strict=True))
    losses: list[float] = []
    for _ in rounds:
        loss = cross_entropy(own(x), y)
        own.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in own.parameters():
                assert p.grad is not None
                p -= 0.5 * p.grad
    close(state, {name: p.tolist() for name, p in own.named_parameters()}, 1e-6)
    assert [found["train_loss"] for found in rounds] == pytest.approx(losses, rel=1e-5)


def test_feddyns_round_0_with_all_clients_goes_twice_as_far_as_fedavg():
    # K = 1: no pull is felt in the first step. Sizes, and so weights, are equal.
    sizes, own = (20,) * 6, {"rounds": 1, "sampler__clients_per_round": 6, "client__steps": 1}
    start = dict(model().named_parameters())
    _, once = run("plain", *sizes, **own)
    for alpha in (0.01, 1.0, 100.0):
        _, found = run("feddyn", *sizes, **own, client__alpha=alpha)
        twice = {n: (2 * torch.tensor(once[n]) - p.detach()).tolist() for n, p in start.items()}
        close(found, twice, 1e-6)


# ---------------------------------------------------------------------------- what is remembered


def test_feddyns_h_is_always_the_mean_of_all_lambdas():
    with simulation("feddyn", rounds=6, sampler__clients_per_round=3) as found:
        for _ in found.rounds():
            held = memories(found, "lambda_k")
            torch.testing.assert_close(found.server.sent["h"], held.mean(dim=0), rtol=0, atol=1e-6)
        assert found.server.sent["h"].abs().max() > 1e-3


def test_scaffolds_c_is_always_the_mean_of_all_c_k():
    with simulation("scaffold", rounds=6, sampler__clients_per_round=3) as found:
        for _ in found.rounds():
            held = memories(found, "c_k")
            torch.testing.assert_close(found.server.sent["c"], held.mean(dim=0), rtol=0, atol=1e-6)
        assert found.server.sent["c"].abs().max() > 1e-3


@pytest.mark.parametrize("cohort", [3, len(SIZES)])
def test_vrl_sgds_deviations_always_sum_to_nothing(cohort: int):
    with simulation("vrl-sgd", rounds=6, sampler__clients_per_round=cohort) as found:
        for _ in found.rounds():
            held = memories(found, "deviation")
            assert held.sum(dim=0).abs().max() < 1e-5
        assert memories(found, "deviation").abs().max() > 1e-2


class Bad:
    """One client has NaN among its samples, in every round."""

    def __init__(self, bad: int) -> None:
        self.inner, self.bad = tiny_data(*SIZES), bad
        self.clients = self.inner.clients

    def size(self, k: int) -> int:
        return self.inner.size(k)

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        x, y = self.inner.client(k)
        return (x * torch.nan if k == self.bad else x), y

    def test(self) -> tuple[Tensor, Tensor]:
        return self.inner.test()


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize("row", REMEMBERING)
def test_a_rejected_client_changes_nobodys_memory(row: str, engine: str):
    own = settings(row, **{"sampler.clients_per_round": len(SIZES), "engine.name": engine})
    plan = load("digits", own)[1].plan(model=model(), data=Bad(2))
    with closing(Simulation(plan)) as found:
        assert found.memories
        for told in map(facts, found.rounds()):
            assert [c["id"] for c in told["clients"] if "rejected" in c] == [2]
        assert found.memories.version(2) == 0
        held = memories(found, found.parts.client.remembers[0])
        assert held.isfinite().all()
        if row == "vrl-sgd":
            assert held.sum(dim=0).abs().max() < 1e-5
        if row == "feddyn":
            torch.testing.assert_close(found.server.sent["h"], held.mean(dim=0))


# ------------------------------------------------------------------------------------- refusals

ROBUST = ["median", "trimmed-mean"]


@pytest.mark.parametrize("server", ["momentum", "adam", "adagrad", "yogi"])
def test_feddyn_needs_sgd_at_the_server(server: str):
    with pytest.raises(
        ConfigError, match=r"FedDyn .* plain SGD at rate 1, not of .*server.name=sgd"
    ):
        load("digits", {"client.name": "feddyn", "server.name": server})


def test_feddyn_needs_a_server_rate_of_1():
    with pytest.raises(ConfigError, match=r"not of SGD\(lr=0.5.*\): .*set .*server.lr=1"):
        load("digits", {"client.name": "feddyn", "server.lr": 0.5})
    with pytest.raises(ConfigError, match=r"not of SGD\(.*cosine.*server.schedule=constant"):
        load("digits", {"client.name": "feddyn", "server.schedule": "cosine"})
    load("digits", {"client.name": "feddyn", "server.lr": 1.0})


@pytest.mark.parametrize("filter", ROBUST)
@pytest.mark.parametrize("client", ["feddyn", "fednova"])
def test_what_needs_a_mean_is_refused_with_a_robust_one(client: str, filter: str):
    with pytest.raises(ConfigError, match=r"is right for a mean .*filter.name = multi-krum"):
        load("digits", {"client.name": client, "filter.name": filter})


@pytest.mark.parametrize("key", ["sampler.name", "weighting.name"])
@pytest.mark.parametrize("client", ["feddyn", "fednova"])
def test_what_needs_a_mean_is_refused_with_weights_of_another_sum(client: str, key: str):
    with pytest.raises(ConfigError, match=r"weights of Optimal do not sum to 1: use another"):
        load("digits", {"client.name": client, key: "optimal"})


@pytest.mark.parametrize("weighting", ["equal", "fedadp", "inverse-distance"])
@pytest.mark.parametrize("sampler", ["md", "optimal"])
def test_a_samplers_own_weights_are_not_replaced(sampler: str, weighting: str):
    with pytest.raises(ConfigError, match=r"weights of sampler .*use weighting.name = samples"):
        load("digits", {"sampler.name": sampler, "weighting.name": weighting})
    load("digits", {"sampler.name": "uniform", "weighting.name": weighting})


def test_a_robust_mean_knows_nothing_of_what_a_sampler_keeps():
    with pytest.raises(ConfigError, match=r"Median ignores weights, .* use sampler.name = uniform"):
        load("digits", {"sampler.name": "optimal", "filter.name": "median"})


def test_feddyn_is_refused_with_a_filter_that_it_would_go_past():
    with pytest.raises(ConfigError, match=r"FedDyn moves θ by the whole updates .* NormClip"):
        load("digits", {"client.name": "feddyn", "filter.name": "norm-clip"})


ALLOWED = [
    *(("plain", f) for f in (*ROBUST, "norm-clip", "multi-krum")),
    *(("fedsgd", f) for f in (*ROBUST, "norm-clip", "multi-krum")),
    *(("fedprox", f) for f in (*ROBUST, "norm-clip", "multi-krum")),
    *(("scaffold", f) for f in (*ROBUST, "norm-clip", "multi-krum")),
    *(("vrl-sgd", f) for f in (*ROBUST, "norm-clip", "multi-krum")),
    *(("feddyn", "multi-krum"), ("fednova", "norm-clip"), ("fednova", "multi-krum")),
]


@pytest.mark.parametrize(("row", "filter"), ALLOWED)
def test_what_is_not_refused_runs(row: str, filter: str):
    rounds, _ = run(row, filter__name=filter, rounds=2)
    assert all(found["status"] == "stepped" for found in rounds)


def test_a_methods_own_refusal_names_the_section():
    with pytest.raises(ConfigError, match=r"\[client\] VRLSGD\(clip_norm=1.0\): must be 0"):
        load("digits", {"client.name": "vrl-sgd", "client.clip_norm": 1.0})
    with pytest.raises(ConfigError, match=r"\[client\] FedSGD\(lr=0.1\): .*set server.lr"):
        load("digits", {"client.name": "fedsgd", "client.lr": 0.1})
    with pytest.raises(ConfigError, match=r"client.option = 'III': must be"):
        load("digits", {"client.name": "scaffold", "client.option": "III"})


def test_a_wrong_number_of_clients_is_told_before_the_first_round():
    config = Config.of({"client": {"name": "feddyn", "clients": 9}})
    with pytest.raises(ValueError, match=r"FedDyn\(clients=9\): there are 8 in the data"):
        Simulation(config.plan(model=model(), data=tiny_data(*SIZES)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"filter.name": "multi-krum", "filter.f": 3}, "needs at least 9 updates, got 5"),
        ({"filter.name": "multi-krum", "filter.m": 50}, "needs at least 51 updates, got 5"),
        ({"sampler.name": "md", "filter.name": "median"}, "ignores weights"),
        ({"sampler.name": "clustered", "filter.name": "trimmed-mean"}, "ignores weights"),
    ],
)
def test_what_could_never_step_is_refused_before_the_run(given: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        load("digits", {"adapter.name": "none", **given})


def test_the_way_back_from_a_method_with_fixed_settings(tmp_path: Path):
    path = tmp_path / "f.toml"
    path.write_text(load("digits", {"client.name": "fedsgd"})[1].to_toml())
    assert load(path, {"client.name": "plain"})[1].sections["client"].batch_size == 64
