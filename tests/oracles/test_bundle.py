"""Several updates handed over at once count as the same ones one by one, to the last bit."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedglad import Glad, Record, Server, Update
from fedglad.filters import MultiKrum, NormClip
from fedglad.optimizers import Adam
from fedglad.records import Bundle, Failure, Several

SHAPES = {"small": [(7, 9), (5,)], "large": [(700, 900), (5,)]}
FILTERS = {"none": None, "clip": NormClip(max_norm=1.0), "krum": MultiKrum(f=1)}


def model(size: str) -> dict[str, Tensor]:
    return {f"t{i}": torch.zeros(shape) for i, shape in enumerate(SHAPES[size])}


def bundle(server: Server, k: int = 6, scale: float = 1e-3) -> Bundle:
    rng = torch.Generator().manual_seed(1)
    drawn = [
        {name: scale * torch.randn(x.shape, generator=rng) for name, x in server.params.items()}
        for _ in range(k)
    ]
    return Bundle(
        deltas=torch.stack([server.layout.pack(own) for own in drawn]),
        weights=[1.0, 3.0, 2.0, 5.0, 4.0, 6.0][:k],
        clients=list(range(10, 10 + k)),
        steps=[1] * k,
        losses=[0.5 * j for j in range(k)],
    )


def outcome(server: Server, record: Record) -> tuple[Any, ...]:
    return record.to_dict(), {name: value.tolist() for name, value in server.params.items()}


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("size", SHAPES)
def test_a_bundle_is_its_updates_one_by_one(size: str, filter: str):
    def fresh() -> Server:
        return Server(model(size), optimizer=Adam(), adapter=Glad(), filter=FILTERS[filter])

    together, apart, several = fresh(), fresh(), fresh()
    for _ in range(3):
        given = bundle(together)
        wanted = outcome(apart, apart.step(iter(given.updates())))
        assert outcome(together, together.step(iter([given]))) == wanted
        assert outcome(several, several.step(iter([Several(given.updates())]))) == wanted


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda b: b.deltas[2, 0].fill_(math.nan), "holds NaN"),
        (lambda b: b.deltas[2].mul_(1e9), "times"),
        (lambda b: b.weights.__setitem__(2, -1.0), "weight -1"),
        (lambda b: b.weights.__setitem__(2, math.nan), "weight nan"),
        (lambda b: b.deltas[2, -1].fill_(1.0), "padding is not zero"),
    ],
    ids=["NaN", "huge", "negative weight", "NaN weight", "padding"],
)
def test_a_bad_row_is_left_out_alone(spoil: Any, said: str):
    server, without = Server(model("small"), adapter=Glad()), Server(model("small"), adapter=Glad())
    given = bundle(server)
    good = [u for u in given.updates() if u.client != 12]
    clean = [Update(u.delta.clone(), weight=u.weight, client=u.client) for u in good]  # type: ignore
    spoil(given)
    record = server.step(iter([given]))
    assert list(record.rejected) == [12]
    assert said in record.rejected[12]
    without.step(iter(clean))
    for name, value in server.params.items():
        assert value.equal(without.params[name])


def test_a_bundle_of_another_make_is_refused_row_by_row():
    server = Server(model("small"))
    given = bundle(server)
    other = Bundle(
        deltas=given.deltas.double(),
        weights=given.weights,
        clients=given.clients,
        steps=given.steps,
        losses=given.losses,
    )
    record = server.step(iter([other]))
    assert record.status == "skipped"
    assert len(record.rejected) == 6


def test_a_loss_that_is_not_finite_is_not_recorded_and_failures_go_between():
    server = Server(model("small"))
    given = bundle(server)
    given.losses[1] = math.inf
    record = server.step(iter([given, Failure(99, "it slept")]))
    assert [client["loss"] for client in record.clients][:3] == [0.0, None, 1.0]
    assert record.rejected == {99: "it slept"}
