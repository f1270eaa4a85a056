"""A block of positions that is judged and summed elsewhere gives the bits of one that is not."""

import copy
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedglad import Server, Update
from fedglad.records import POSITIONS, Failure
from fedglad.server.compatibility import needs_updates
from fedglad.server.server import REGISTRIES

from .support import Awkward, Correction, bits, difference, make, trained, with_extra
from .test_hostile import CONTENT

MODEL = Awkward()
COUNT = 40  # clients: two whole blocks and half of a third
SUMMED = [
    (role, name)
    for role in ("filter", "weighting", "adapter", "optimizer")
    for name, row in REGISTRIES[role].items()
    if not needs_updates(row)
]


def honest(t: int, k: int) -> Update:
    if k % 3 == 2:
        return Update(model=trained(MODEL, t, k), weight=3, client=k, loss=0.5, steps=3)
    return Update(difference(MODEL, t, k), weight=1 + k % 4, client=k, loss=0.5, steps=1 + k % 2)


def elsewhere(server: Server, updates: Iterable[Any]) -> Iterator[Any]:
    """The updates as blocks that were summed by others, who know of the round what can be sent."""
    everything, rule = list(updates), pickle.loads(pickle.dumps(server.rule()))
    theta, buffers = copy.deepcopy(server.packed)
    for k in range(0, len(everything), POSITIONS):
        block = rule.block(everything[k : k + POSITIONS], server.layout, theta, buffers)
        yield pickle.loads(pickle.dumps(block))


def same(updates: list[list[Any]], **parts: Any) -> None:
    """Plays some rounds both ways, and compares every bit of the records and the server."""
    here, there = Server(MODEL, **parts), Server(MODEL, **parts)
    for cohort in updates:
        records = here.step(iter(cohort)), there.step(elsewhere(there, cohort))
        assert bits(records[0]) == bits(records[1])
        assert bits(here) == bits(there)


@pytest.mark.parametrize(("role", "name"), SUMMED)
def test_every_part_that_needs_no_single_updates(role: str, name: str):
    rounds = [[honest(t, k) for k in range(COUNT)] for t in range(3)]
    same(rounds, **{role: make(role, name)}, **({} if role == "adapter" else {"adapter": GLAD}))


GLAD = make("adapter", "glad")


def test_what_client_methods_send_along():
    rounds = [with_extra([honest(t, k) for k in range(COUNT)], MODEL) for t in range(3)]
    same(rounds, adapter=GLAD, method=Correction())


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, COUNT - 1), st.sampled_from([*CONTENT, "lost"]))),
    st.sampled_from([1, 1, 1e-3, 50.0, 1e5]),
    st.booleans(),
)
def test_hostile_updates(bad: list[tuple[int, str]], scale: float, guard: bool):
    rounds: list[list[Any]] = []
    for t in range(3):
        cohort: list[Any] = [honest(t, k) for k in range(COUNT)]
        for place, what in bad if t != 1 else ():
            if what == "lost":
                cohort[place] = Failure(place, "gone")
            elif isinstance(CONTENT[what], Update):
                cohort[place] = CONTENT[what]
            else:
                cohort[place] = Update(CONTENT[what], client=f"bad {place}", weight=scale)
        rounds.append(cohort)
    given: dict[str, Any] = {} if guard else {"guard": None}
    same(rounds, adapter=GLAD, filter=make("filter", "norm-clip"), **given)


def test_a_block_is_summed_by_itself():
    # Between 2^24 and 2^25 a float32 has steps of 2. The first block is 2^24 and fifteen times 1:
    # each 1 is lost, as 2^24 + 1 is rounded to 2^24. The second block is 1 + 1 + 1 = 3, and
    # 2^24 + 3 is rounded to 2^24 + 4. One by one, all 18 would be lost.
    values = [2.0**24] + [1.0] * 18
    updates = [Update({"w": torch.tensor([value])}, client=k) for k, value in enumerate(values)]
    expected = np.float32(2**24 + 4) * np.float32(1 / 19)
    for form in (updates, iter(updates)):
        server = Server({"w": torch.zeros(1)}, guard=None)
        server.step(form)
        assert server.state["w"].item() == -expected


def test_one_that_is_left_out_keeps_its_place():
    """So who is in a block does not depend on who fails."""
    values = [2.0**24] + [1.0] * 18
    updates: list[Any] = [Update({"w": torch.tensor([v])}, client=k) for k, v in enumerate(values)]
    updates[3] = Failure(3, "gone")
    server = Server({"w": torch.zeros(1)}, guard=None)
    server.step(updates)
    assert server.state["w"].item() == -np.float32(2**24 + 4) * np.float32(1 / 18)
