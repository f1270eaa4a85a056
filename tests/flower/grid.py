"""Flower's Grid in one process: clients are functions; replies come late, never, twice or broken.

Nothing sleeps: `Clock` stands in for the `time` module of the code that waits.
"""

import itertools
import math
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedglad import Server, Update

Client = Callable[[Message, Context], Message]
Arrays = dict[str, np.ndarray]

_instances = itertools.count()


@dataclass
class Node:
    """A SuperNode; `index` is its place among the clients, `pulls` how often it was asked for."""

    index: int
    client: Client
    info: NodeInfo
    context: Context


@dataclass
class LocalGrid(Grid):
    """Ten lines of SuperLink: what is pushed is answered when it is pulled.

    | field | meaning |
    |---|---|
    | `late` | {client: the pulls of its message that find nothing} |
    | `never`, `lost`, `twice` | clients that do not answer, whose node is gone, that answer twice |
    | `arrival` | the order in which replies come to `send_and_receive`; by default the clients' |
    | `named`, `keyed` | whether nodes have a name, a public key |
    | `fails` | called with "push" or "pull" and the message type; may raise |
    | `salt` | two grids with the same one have the same node ids, all others different ones |
    """

    clients: Sequence[Client]
    named: bool = False
    keyed: bool = False
    late: dict[int, int] = field(default_factory=dict[int, int])
    never: set[int] = field(default_factory=set[int])
    lost: set[int] = field(default_factory=set[int])
    twice: set[int] = field(default_factory=set[int])
    arrival: Sequence[int] | None = None
    fails: Callable[[str, str], None] = lambda call, kind: None
    salt: int | None = None

    def __post_init__(self) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        own = [17, next(_instances)] if self.salt is None else [18, self.salt]
        self._rng = np.random.default_rng(own)
        self.nodes: dict[int, Node] = {}
        self.pushed: list[tuple[str, int]] = []  # (message type, client), as asked
        self.sent: list[Message] = []  # train messages
        self.most_pulled = 0  # replies in one pull
        self.most_alive = 0  # replies that were pulled and not let go
        self._waiting: dict[str, Message] = {}
        self._pulls: Counter[str] = Counter()
        self._alive = 0
        for client in self.clients:
            self.join(client)

    def join(self, client: Client) -> int:
        """A further node; its index."""
        index = len(self.nodes) and 1 + max(node.index for node in self.nodes.values())
        name = f"site-{index:02d}" if self.named else ""
        key = f"ecdsa {index}".encode() if self.keyed else b""
        number = int(self._rng.integers(2, 2**64, dtype=np.uint64))
        info = NodeInfo(node_id=number, name=name, public_key=key)
        context = Context(1, number, {"partition-id": index}, RecordDict(), {})
        self.nodes[number] = Node(index, client, info, context)
        return index

    def leave(self, index: int) -> None:
        self.nodes = {number: node for number, node in self.nodes.items() if node.index != index}

    def asked(self, kind: str = "train") -> list[int]:
        """The clients that were sent messages of one kind, in order."""
        return [index for found, index in self.pushed if found == kind]

    # ------------------------------------------------------------------------------ Flower's side

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        return Run.create_empty(1)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.nodes)  # an order that has nothing to do with the clients'

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [self.nodes[number].info for number in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        found: list[str] = []
        for message in messages:
            meta = message.metadata
            self.fails("push", meta.message_type)
            meta.__dict__["_message_id"] = uuid.uuid4().hex
            found.append(meta.message_id)
            self._waiting[meta.message_id] = _written(message)
            self.pushed.append((meta.message_type, self.nodes[meta.dst_node_id].index))
            if meta.message_type == "train":
                self.sent.append(self._waiting[meta.message_id])
        return found

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found: list[Message] = []
        for number in message_ids:
            if number not in self._waiting:
                continue
            message = self._waiting[number]
            self.fails("pull", message.metadata.message_type)
            self._pulls[number] += 1
            found += self._answer(number, message)
        self.most_pulled = max(self.most_pulled, len(found))
        # Not by `content.array_records`: that makes a cycle, which lives until it is collected.
        contents = [reply.content for reply in found if reply.has_content()]
        for part in itertools.chain.from_iterable(content.values() for content in contents):
            if isinstance(part, ArrayRecord):
                self._alive += 1
                weakref.finalize(part, self._let_go)
        self.most_alive = max(self.most_alive, self._alive)
        return found

    def _let_go(self) -> None:
        self._alive -= 1

    def _answer(self, number: str, message: Message) -> list[Message]:
        node = self.nodes.get(message.metadata.dst_node_id)
        if node is None or node.index in self.lost:
            del self._waiting[number]
            return [_unavailable(message)]
        if node.index in self.never or self._pulls[number] <= self.late.get(node.index, 0):
            return []
        del self._waiting[number]
        return [_run(node, message) for _ in range(1 + (node.index in self.twice))]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        sent = {number: self._waiting[number] for number in self.push_messages(messages)}
        place = {node: at for at, node in enumerate(self.arrival or ())}

        def comes(number: str) -> int:
            index = self.nodes[sent[number].metadata.dst_node_id].index
            return place.get(index, index)

        replies: list[Message] = []
        for number in sorted(sent, key=comes):
            index = self.nodes[sent[number].metadata.dst_node_id].index
            for _ in range(1 + self.late.get(index, 0)):
                replies += self.pull_messages([number])
        return replies


def _written(message: Message) -> Message:
    """The message as it was when it was sent: Flower changes its config in later rounds."""
    copied = {
        key: ConfigRecord(dict(part)) if isinstance(part, ConfigRecord) else part
        for key, part in message.content.items()
    }
    return Message(metadata=message.metadata, content=RecordDict(copied))  # pyright: ignore[reportCallIssue]


def _run(node: Node, message: Message) -> Message:
    """As a SuperNode does: what a client raises becomes an error reply."""
    try:
        return node.client(message, node.context)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _unavailable(message: Message) -> Message:
    """As the SuperLink says it of a node that was killed: from node 1, to a message."""
    meta = message.metadata
    found = Metadata(1, uuid.uuid4().hex, 1, 1, meta.message_id, "", 0.0, 60.0, meta.message_type)
    reason = Error(ErrorCode.NODE_UNAVAILABLE, "The node did not send a heartbeat")
    return Message(metadata=found, error=reason)  # pyright: ignore[reportCallIssue]


class Clock:
    """Stands in for the `time` module: sleeping is what makes it later."""

    def __init__(self) -> None:
        self.now = 1e6
        self.naps: list[float] = []
        self.on_nap: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.naps.append(seconds)
        assert len(self.naps) < 100_000, "polls for ever"
        self.now += seconds
        self.on_nap()

    def monotonic(self) -> float:
        return self.now

    time = perf_counter = monotonic


# ------------------------------------------------------------------------------------------ clients


class Linear:
    """Fits y = x w + b to its own samples by gradient descent; nothing but NumPy."""

    def __init__(self, index: int, *, n: int | None = None, partition: int | None = None) -> None:
        rng = np.random.default_rng([3, index])
        self.n = n or 8 + 5 * index
        self.partition = index if partition is None else partition
        self.x = rng.standard_normal((self.n, 3))
        noise = 0.1 * rng.standard_normal((self.n, 2))
        self.y = self.x @ rng.normal([[1, -2], [0.5, 0], [3, 1]], 0.5) + 0.3 + noise

    def loss(self, arrays: Mapping[str, np.ndarray]) -> float:
        return float(np.square(self.x @ arrays["weight"].T + arrays["bias"] - self.y).mean())

    def train(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        w, b = arrays["weight"].astype(float), arrays["bias"].astype(float)
        for _ in range(3):
            error = (self.x @ w.T + b - self.y) / self.n
            w, b = w - 0.2 * error.T @ self.x, b - 0.2 * error.sum(axis=0)
        moved = {"weight": w, "bias": b}
        return {name: moved[name].astype(old.dtype) for name, old in arrays.items()}

    def metrics(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {"train_loss": self.loss(arrays), "num-examples": self.n}

    def __call__(self, message: Message, context: Context) -> Message:
        content: dict[str, Any]
        told: dict[str, Any]
        match message.metadata.message_type:
            case "query.fedglad":
                told = {"partition-id": self.partition, "num-examples": self.n}
                content = {"query": MetricRecord(told)}
            case "evaluate":
                told = {"eval_loss": self.loss(received(message)), "num-examples": self.n}
                content = {"metrics": MetricRecord(told)}
            case "train":
                arrays = received(message)
                content = {
                    "arrays": record(self.train(arrays)),
                    "metrics": MetricRecord(self.metrics(arrays)),
                }
            case other:
                raise ValueError(f"no function for {other}")
        return Message(RecordDict(content), reply_to=message)


class Normed(Linear):
    """The same with BatchNorm's buffers; the variance falls quickly, as it does in training."""

    def train(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        moved = super().train({name: arrays[name] for name in ("weight", "bias")})
        mean, var = arrays["norm.running_mean"], arrays["norm.running_var"]
        return {
            **moved,
            "norm.running_mean": (0.5 * mean + 0.1 * self.partition).astype(mean.dtype),
            "norm.running_var": (0.2 * var + 0.01 * self.partition).astype(var.dtype),
            "norm.num_batches_tracked": np.asarray(
                arrays["norm.num_batches_tracked"] + 1 + self.partition
            ),
        }


def clients(count: int, kind: type[Linear] = Linear) -> list[Linear]:
    return [kind(index) for index in range(count)]


def record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


def numpy(arrays: ArrayRecord) -> Arrays:
    return {name: array.numpy() for name, array in arrays.items()}


def received(message: Message) -> Arrays:
    """The model that a client was sent."""
    (arrays,) = (part for part in message.content.values() if isinstance(part, ArrayRecord))
    return numpy(arrays)


def server_round(message: Message) -> int:
    """The round that a client was told, from 1 on."""
    (config,) = (part for part in message.content.values() if isinstance(part, ConfigRecord))
    return int(str(config["server-round"]))


def model(dtype: Any = np.float32, *, normed: bool = False) -> Arrays:
    rng = np.random.default_rng(1)
    found = {"weight": rng.standard_normal((2, 3)), "bias": rng.standard_normal(2)}
    found = {name: value.astype(dtype) for name, value in found.items()}
    if normed:
        found["norm.running_mean"] = np.zeros(2, dtype)
        found["norm.running_var"] = np.ones(2, dtype)
        found["norm.num_batches_tracked"] = np.array(0)
    return found


def bits(arrays: Mapping[str, Any] | ArrayRecord) -> dict[str, Any]:
    """Equal only if every bit, shape and dtype is, and the order of the names."""
    found = numpy(arrays) if isinstance(arrays, ArrayRecord) else arrays
    listed = [(name, np.asarray(value)) for name, value in found.items()]
    return {
        "names": [name for name, _ in listed],
        **{name: (str(value.dtype), value.shape, value.tobytes()) for name, value in listed},
    }


def close(first: Mapping[str, Any], second: Mapping[str, Any], tolerance: float = 1e-6) -> bool:
    return first.keys() == second.keys() and all(
        np.allclose(first[name], second[name], rtol=tolerance, atol=tolerance) for name in first
    )


# ------------------------------------------------------------------------------------------- oracle


def replay(
    records: Sequence[Mapping[str, Any]],
    trained_by: Callable[[Any, Arrays], Update],
    start: Arrays,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """A plain Server stepped by the updates that the records say were accepted, in their order."""
    server = Server(start, **settings)
    for found in records:
        if found["status"] == "skipped":
            continue
        sent = {name: value.numpy().copy() for name, value in server.state.items()}
        accepted = [client["id"] for client in found["clients"] if "rejected" not in client]
        assert server.step([trained_by(client, sent) for client in accepted]).stepped
    return {name: server.state[name] for name in start}


def by(population: Sequence[Linear]) -> Callable[[Any, Arrays], Update]:
    """What `replay` needs: the update of a client by its place among them."""

    def update(client: Any, sent: Arrays) -> Update:
        own = population[client]
        return Update(model=own.train(sent), weight=own.n, client=client, loss=own.loss(sent))

    return update


def facts(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records without their times."""
    return [{key: value for key, value in found.items() if key != "seconds"} for found in records]


def who(found: Mapping[str, Any]) -> list[Any]:
    return [client["id"] for client in found["clients"]]


def rejected(found: Mapping[str, Any]) -> dict[Any, str]:
    return {c["id"]: c["rejected"] for c in found["clients"] if "rejected" in c}


def finite(result: Result) -> bool:
    return all(math.isfinite(float(np.abs(x).sum())) for x in numpy(result.arrays).values())
