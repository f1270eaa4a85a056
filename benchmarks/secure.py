"""What a secure sum costs: seconds and bytes of a round, beside plain sums of the same updates.

Updates of a model of 1.2 million parameters in 10 tensors, 10 and 50 clients, all roles in one
process, one after the other: so the seconds of a client are what each of them spends on its own
machine, beside its training. `dropped` of the clients leave when all have shared their secrets,
which is the dearest moment: the server makes their masks with everybody who stayed. Bytes are those
of the messages' contents, without what Flower and HTTP put around them. Of each
stage the best of several rounds.

    python benchmarks/secure.py [--repeats 3] [--quick]
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from _shared import load, machine, options, table

from fedglad import Server, Update
from fedglad.secure import Round, SecureClient, SecureSum
from fedglad.secure.contents import pack, unpack
from fedglad.secure.fixed import as_bytes
from fedglad.server import Collector, Sums

TENSORS, SIZE = 10, 120_000
Model = dict[str, np.ndarray]


@dataclass
class Cost:
    """Seconds by who spends them and on what; bytes that one client sends, and is sent."""

    up: int = 0
    down: int = 0
    stages: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))

    def timed(self, whose: str, stage: str, run: Any, *args: Any) -> Any:
        begin = time.perf_counter()
        done = run(*args)
        self.stages[f"{whose} {stage}"] += time.perf_counter() - begin
        return done

    def seconds(self, whose: str) -> float:
        return sum(spent for stage, spent in self.stages.items() if stage.startswith(whose))

    def best(self, others: "Sequence[Cost]") -> None:
        """Takes the shortest time of each stage."""
        self.stages = {stage: min(c.stages[stage] for c in others) for stage in self.stages}


def size_of(message: Mapping[str, Any]) -> int:
    """Bytes of a message's values; integers of a list count as 8."""

    def one(value: Any) -> int:
        if isinstance(value, list):
            return sum(one(part) for part in value)  # pyright: ignore[reportUnknownVariableType]
        return len(value) if isinstance(value, bytes | str) else 8

    return sum(one(value) for value in message.values())


def models(seed: int = 0) -> tuple[Model, Model]:
    """What is sent, and what a client trains of it."""
    rng = np.random.default_rng(seed)
    sent = {f"layer{k}": rng.standard_normal(SIZE, dtype=np.float32) for k in range(TENSORS)}
    moved = {n: v + 1e-2 * rng.standard_normal(SIZE, dtype=np.float32) for n, v in sent.items()}
    return sent, moved


def secure(clients: int, dropped: int, sent: Model, moved: Model) -> Cost:
    cost, everybody = Cost(), {k: SecureClient() for k in range(1, clients + 1)}
    round, names, sizes = Round(SecureSum(), "benchmark", clients), [*sent], 0
    asked = round.ask_keys()
    for stage in ("keys", "shares"):
        replies = {
            k: cost.timed("client", stage, getattr(client, stage), asked[k])
            for k, client in everybody.items()
        }
        cost.up += size_of(replies[1])
        cost.down += size_of(asked[1])
        asked = cost.timed("server", stage, getattr(round, f"take_{stage}"), replies)
    cost.down += size_of(asked[1]) + sum(value.nbytes for value in sent.values())
    for k in range(1, clients + 1 - dropped):
        client = everybody[k]
        cost.timed("client", "masked", client.receive, asked[k])

        def packed(client: SecureClient = client) -> Any:
            return pack(sent, moved, names, [], weight=600.0, loss=0.5, point=client.point)

        vector = cost.timed("client", "packed", packed)
        body, numbers = cost.timed("client", "masked", client.mask, *vector)
        reply = {"session": round.session, "numbers": as_bytes(numbers)}
        assert cost.timed("server", "added", round.take_masked, k, reply, body)
        sizes = size_of(reply) + body.nbytes
    cost.up += sizes
    asked = round.ask_unmask()
    replies = {
        k: cost.timed("client", "unmask", everybody[k].unmask, message)
        for k, message in asked.items()
    }
    cost.up += size_of(replies[1])
    cost.down += size_of(asked[1])
    total = cost.timed("server", "unmasked", round.unmask, replies)

    server = Server({name: torch.from_numpy(value) for name, value in sent.items()}, guard=None)

    def step() -> Any:
        found = unpack(total.body, total.numbers, sent, names, [])
        sums = Sums(
            total={name: torch.from_numpy(value).float() for name, value in found.total.items()},
            sum_sq=found.sum_sq,
            weight=found.weight,
            count=len(total.clients),
        )
        return server.step_sums(sums)

    assert cost.timed("server", "stepped", step).stepped
    return cost


def plain(clients: int, sent: Model, moved: Model) -> Cost:
    cost = Cost()
    server = Server({name: torch.from_numpy(value) for name, value in sent.items()}, guard=None)

    def norms() -> list[float]:
        return [float(np.square(sent[n].astype(float) - moved[n]).sum()) for n in sent]

    collector = Collector(server)
    update = Update(model={n: torch.from_numpy(v) for n, v in moved.items()}, weight=600.0)
    for _ in range(clients):
        found = cost.timed("client", "norms", norms)
        cost.timed("server", "added", collector.take, update, found)
    assert cost.timed("server", "stepped", lambda: server.step_sums(collector.sums())).stepped
    size = sum(value.nbytes for value in sent.values())
    cost.up, cost.down = size + 8 * TENSORS, size
    return cost


def main() -> None:
    args = options(__doc__ or "", rounds=1, repeats=3).parse_args()
    print(f"{machine()}; load {load()}")
    sent, moved = models()
    rows: list[tuple[object, ...]] = []
    parts: list[str] = []
    for clients in (10, 50):
        for name, dropped in (("plain sums", -1), ("secure", 0), ("secure", clients // 10)):
            costs = [
                plain(clients, sent, moved)
                if dropped < 0
                else secure(clients, dropped, sent, moved)
                for _ in range(1 if args.quick else args.repeats)
            ]
            cost = costs[0]
            cost.best(costs)
            rows.append(
                (
                    clients,
                    name,
                    max(dropped, 0),
                    f"{cost.seconds('client') / (clients - max(dropped, 0)):.3f}",
                    f"{cost.seconds('server'):.3f}",
                    f"{cost.up / 1e6:.2f}",
                    f"{cost.down / 1e6:.2f}",
                )
            )
            spent = ", ".join(f"{stage} {s:.3f}" for stage, s in cost.stages.items())
            parts.append(f"{clients} clients, {name}, {max(dropped, 0)} dropped: {spent}")
    head = ("clients", "sums", "dropped", "s a client", "s server", "MB up", "MB down")
    table(head, rows)
    print("\n" + "\n".join(parts) + f"\n\nload {load()}")


if __name__ == "__main__":
    main()
