"""Work that is shared among threads: all of it, once, and each thread computes alone."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedglad import Glad, Server
from fedglad.averages import EMA
from fedglad.core.threads import share, threads
from fedglad.optimizers import SGD, Adam


@pytest.mark.parametrize(("count", "alone"), [(1, False), (3, False), (3, True)])
def test_every_item_is_worked_on_once_by_threads_that_compute_alone(count: int, alone: bool):
    both = threading.Barrier(1 if alone else count)
    done: list[int] = []
    by: set[int] = set()

    def worker() -> Callable[[int], None]:
        both.wait(30)  # nobody begins before all are there
        by.add(threading.get_ident())
        return one

    def one(k: int) -> None:
        assert alone or torch.get_num_threads() == 1
        done.append(k)

    with threads(count):
        share(range(100), worker, alone=alone)
        assert torch.get_num_threads() == count
    assert sorted(done) == [*range(100)]
    assert len(by) == (1 if alone else count)


def test_what_one_thread_raises_stops_the_others():
    seen: list[int] = []

    def one(k: int) -> None:
        seen.append(k)
        raise ValueError(f"item {k}")

    with threads(2), pytest.raises(ValueError, match="item"):
        share(range(1000), lambda: one)
    assert len(seen) <= 2


class Noted(SGD):
    """An own rule that remembers who called it."""

    def step(self, theta: Tensor, mean: Tensor, s: float, slots: dict[str, Tensor], t: int) -> None:
        called.add(threading.get_ident())
        super().step(theta, mean, s, slots, t)


called: set[int] = set()


def test_an_own_rule_is_called_by_one_thread_alone():
    called.clear()
    with threads(4):
        Server({"w": torch.zeros(2_000_000)}, optimizer=Noted()).step(
            [{"w": torch.ones(2_000_000)}]
        )
    assert called == {threading.get_ident()}


def test_the_bits_do_not_depend_on_the_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (700, 900), "b": (77,), "c": (1_000_001,), "d": (3, 5)}

    def drawn() -> dict[str, Tensor]:
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    model, rounds = drawn(), [[drawn() for _ in range(3)] for _ in range(2)]

    def trained(count: int) -> Server:
        server = Server(model, optimizer=Adam(lr=0.1), adapter=Glad(), average=EMA())
        with threads(count):
            for updates in rounds:
                assert server.step(updates).stepped
        return server

    one, four = trained(1), trained(4)
    for name in shapes:
        assert torch.equal(one.state[name], four.state[name])
        assert torch.equal(one.averaged[name], four.averaged[name])
