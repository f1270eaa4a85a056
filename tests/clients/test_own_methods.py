"""docs/client-methods.md: every class on it trains, and what its hooks are promised holds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from run_support import play, tiny_data
from test_examples import blocks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad.clients import FedProx, LocalData, LocalModel, Plain, Trained, Workbench
from fedglad.clients.method import Batch, Memory
from fedglad.rng import stream

NAMES = ["Distilled", "Extragradient", "HeadFirst", "ByHand", "Loosening", "OwnBiases"]
SETTINGS: dict[str, Any] = {
    **{"rounds": 3, "client.lr": 0.01, "client.batch_size": 10, "engine.name": "serial"},
    **{"sampler.clients_per_round": 3},
}
SIZES = (20, 33, 50, 12)


def two_layers() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with the page's classes, as a reader would save them."""
    name = f"mine_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text("\n".join(blocks("docs/client-methods.md")), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    invalidate_caches()
    return name


def run(name: str, **more: Any) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    named = {key.replace("__", "."): value for key, value in more.items()}
    settings = {**SETTINGS, "client.name": name, **named}
    return play(settings, model=two_layers(), data=tiny_data(*SIZES))


def test_the_page_has_these(page: str):
    assert len(blocks("docs/client-methods.md")) == len(NAMES)
    assert all(issubclass(getattr(import_module(page), name), Plain) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_class_of_the_page_trains_as_it_is_printed(name: str, page: str):
    rounds, state = run(f"{page}:{name}")
    assert all(found["status"] == "stepped" for found in rounds)
    assert not [c for found in rounds for c in found["clients"] if "rejected" in c]
    assert rounds[-1]["train_loss"] < rounds[0]["train_loss"]
    assert state != run("plain")[1]
    processes = {"engine__name": "local", "engine__workers": 2}
    assert run(f"{page}:{name}", **processes) == (rounds, state)
    if name != "Loosening":
        with pytest.raises(ValueError, match=rf"{name} has .*: use engine.name = local"):
            run(f"{page}:{name}", engine__name="batched")


def test_a_fading_pull_is_fedprox_of_another_strength_in_every_round(page: str):
    client = import_module(page).Loosening(mu=0.5, fade=0.5)
    assert [client.at_round(t).mu for t in range(3)] == [0.5, 0.25, 0.125]
    given: dict[str, Any] = {"client__mu": 0.5, "client__fade": 1.0}
    same, _ = run(f"{page}:Loosening", **given)
    assert same == run("fedprox", client__mu=0.5)[0]
    fading, _ = run(f"{page}:Loosening", **{**given, "client__fade": 0.0})
    assert fading[0] == same[0]  # 0⁰ = 1
    assert fading[1] != same[1]
    batched, _ = run(f"{page}:Loosening", **given, engine__name="batched")
    assert batched[-1]["test_loss"] == pytest.approx(same[-1]["test_loss"], abs=1e-4)


# --------------------------------------------------------------------------- what hooks are given


def samples(n: int = 24) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(8)
    return torch.randn(n, 64, generator=rng), torch.randint(10, (n,), generator=rng)


def trained(client: Plain, bench: Workbench | None = None, **more: Any) -> Tensor:
    bench = bench or Workbench(two_layers())
    theta = Workbench(two_layers()).w
    x, y = samples()
    return bench.train(client, theta, {}, x, y, stream(1, "client"), **more).delta


SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "batch_size": 8, "epochs": 2}


@dataclass(frozen=True, kw_only=True)
class Torch(Plain):
    """The local optimizer as torch has it, and a model that is left in disorder."""

    def train(
        self,
        model: LocalModel,
        data: LocalData,
        theta: Tensor,
        memory: Memory,
        rng: np.random.Generator,
        t: int,
    ) -> Trained:
        optimizer = torch.optim.SGD(model.module.parameters(), lr=self.lr, momentum=self.momentum)
        losses: list[float] = []
        for batch in data.batches(self, rng):
            optimizer.zero_grad()  # lets go of the gradients
            loss = model.loss(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        for parameter in model.module.parameters():
            parameter.data = parameter.detach().clone()  # no view into anything
            parameter.requires_grad_(False)
        if t == 7:
            raise RuntimeError("a bug in an own loop")
        return Trained(len(losses), float(np.mean(losses)))


def test_an_own_loop_is_the_usual_one_and_leaves_nothing_behind():
    client = Torch(lr=0.1, batch_size=8, epochs=2)
    plain = Plain(lr=0.1, batch_size=8, epochs=2)
    bench = Workbench(two_layers())
    torch.testing.assert_close(trained(client, bench), trained(plain), rtol=1e-5, atol=1e-6)
    assert trained(plain, bench).equal(trained(plain))  # the next client
    with pytest.raises(RuntimeError, match="own loop"):
        trained(client, bench, t=7)
    assert trained(plain, bench).equal(trained(plain))


@dataclass(frozen=True, kw_only=True)
class Asking(Plain):
    """Remembers what it was given, in every hook."""

    remembers: ClassVar[tuple[str, ...]] = ("seen",)

    def train(self, *given: Any) -> Trained:
        given[3]["seen"] = torch.tensor([float(given[5])])
        return super().train(*given)

    def step(
        self,
        gradient: Callable[[], Tensor],
        model: LocalModel,
        theta: Tensor,
        memory: Memory,
        t: int,
    ) -> Tensor:
        memory["seen"] = torch.cat([memory["seen"], torch.tensor([float(t)])])
        return super().step(gradient, model, theta, memory, t)

    def loss(
        self, model: LocalModel, batch: Batch, theta: Tensor, memory: Memory, t: int
    ) -> Tensor:
        memory["seen"] = torch.cat([memory["seen"], torch.tensor([float(t)])])
        return super().loss(model, batch, theta, memory, t)


def test_every_hook_knows_the_round_and_the_usual_ones_are_plain_to_the_bit():
    bench, (x, y) = Workbench(two_layers()), samples()
    theta = bench.w.clone()
    done = bench.train(Asking(**SGD, steps=2), theta, {}, x, y, stream(1, "client"), t=5)
    assert done.memory["seen"].tolist() == [5.0] * 5
    assert done.delta.equal(trained(Plain(**SGD, steps=2)))


def test_a_model_elsewhere_leaves_no_trace():
    """Neither its gradients, nor its statistics, nor what mode it is in, nor dropout's draws."""
    torch.manual_seed(4)
    layers = [nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10)]
    bench, batch = Workbench(nn.Sequential(*layers)), samples()
    model, other = bench.local, bench.w + 0.1
    model.received = bench.kept()
    before, w, drawn = bench.kept(), bench.w.clone(), torch.get_rng_state()
    layers[1].eval()  # somebody froze it
    bench.grad.zero_()
    there = model.at(other.requires_grad_())
    there.loss(batch).backward()
    assert other.grad is not None
    assert other.grad.abs().max() > 0  # to the vector that asked for it
    assert bench.grad.abs().max() == 0
    assert bench.w.equal(w)
    assert all(value.equal(before[name]) for name, value in bench.kept().items())
    assert [layer.training for layer in layers] == [True, False, True, True]
    assert torch.get_rng_state().equal(drawn)
    # It is just what a copy of the module would say.
    copy = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10))
    copy.load_state_dict({**bench.layout.views(other.detach()), **before})
    torch.testing.assert_close(there(batch[0]), copy.eval()(batch[0]))
    torch.testing.assert_close(there.features(batch[0]), copy[:3](batch[0]))
    torch.testing.assert_close(there.scores(batch[0]), there(input=batch[0]))


def test_what_is_done_aside_is_undone_also_after_an_error():
    bench = Workbench(nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8)))
    w, buffers = bench.w.clone(), bench.kept()

    def fail() -> None:
        with bench.local.aside():
            bench.w.add_(1)
            bench.model(samples()[0])
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        fail()
    assert bench.w.equal(w)
    assert all(value.equal(buffers[name]) for name, value in bench.kept().items())


def test_a_pass_for_some_parameters_is_one_of_a_model_that_has_the_others_frozen():
    """Also under momentum, weight decay and clipping, which go over the whole vector."""
    client = Plain(lr=0.1, weight_decay=0.1, clip_norm=0.5, batch_size=8, epochs=2)
    bench, (x, y) = Workbench(two_layers()), samples()
    theta = bench.w.clone()
    data = LocalData(x, y, lambda x, training: x, torch.device("cpu"))
    head = ["3.weight", "3.bias"]
    bench.local.fit(client, data, theta, {}, np.random.default_rng(1), 0, only=head)
    found = {name: value.clone() for name, value in bench.layout.views(bench.w).items()}

    frozen = two_layers()
    frozen[1].requires_grad_(False)  # type: ignore[index]
    alone = Workbench(frozen)
    alone.local.fit(client, data, alone.w.clone(), {}, np.random.default_rng(1), 0)
    views = alone.layout.views(alone.w)
    for name, value in dict(two_layers().named_parameters()).items():
        assert found[name].equal(views[name] if name in head else value), name
    assert all(parameter.requires_grad for parameter in bench.model.parameters())


def test_a_loss_of_its_own_is_the_one_that_is_reported():
    @dataclass(frozen=True, kw_only=True)
    class Doubled(Plain):
        def loss(
            self, model: LocalModel, batch: Batch, theta: Tensor, memory: Memory, t: int
        ) -> Tensor:
            return 2 * model.loss(batch)

    bench, (x, y) = Workbench(two_layers(), cross_entropy), samples()
    theta, (one, two) = bench.w.clone(), (c(**SGD, steps=1) for c in (Plain, Doubled))
    plain, doubled = (bench.train(c, theta, {}, x, y, stream(1, "client")) for c in (one, two))
    assert doubled.loss == 2 * plain.loss
    torch.testing.assert_close(doubled.delta, 2 * plain.delta)
    assert doubled.delta.equal(trained(replace(one, lr=0.2)))


def test_only_what_a_class_defines_itself_is_its_own():
    assert FedProx().own_hooks == ()
    assert Plain(personal="*.bias").own_hooks == ("personal",)
    assert Asking().own_hooks == ("loss", "step", "train")
