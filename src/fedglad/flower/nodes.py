"""Which nodes are connected, by names that outlive a restart: Flower's node ids do not."""

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedglad.core.checkpoint import whole_number
from fedglad.core.validate import as_number
from fedglad.flower import log
from fedglad.flower.replies import Unusable, is_gone, read
from fedglad.flower.transport import Replies

Kind = Literal["auto", "name", "key", "partition-id", "id"]
KINDS: tuple[str, ...] = get_args(Kind)

QUERY = "query.fedglad"
ANSWER_TIMEOUT = 120.0  # seconds for the answer to a query
TRIES = 2  # that a node which does not answer is given, and one more in every AGAIN rounds
AGAIN = 10
MOST = 100_000  # a partition-id is the client's place among all: larger ones are no places
UNUSUAL = 10_000.0  # times the median: no number of samples that can be meant
HANDLER = '@app.query("fedglad")'


class NoSize(ValueError):
    """A client whose number of samples is not known, and a sampler that needs it."""

    def __init__(self, client: int, name: int | str) -> None:
        super().__init__(
            f"client {name} does not tell a number of samples that can be meant, which the sampler "
            f"needs: answer {HANDLER} with a MetricRecord that has num-examples"
        )
        self.client = client


class Directory:
    """The clients 0 … N − 1, and the nodes behind those that are connected now.

    | kind | a client is |
    |---|---|
    | `name`, `key` | the node's registered name, or its public key |
    | `partition-id` | what it answers to a query of type query.fedglad; also its place k |
    | `id` | Flower's node id, which is another one in every run |

    `auto` takes the first that the first nodes have, in this order: name, partition-id, key, id.
    It asks nobody for a partition-id unless clients must be `known` from round to round, or in the
    next run; then one node first, and the others if that can answer.
    """

    def __init__(self, by: Kind = "auto", *, known: bool = True) -> None:
        if by not in KINDS:
            raise ValueError(f"nodes={by!r}: choose from {', '.join(KINDS)}")
        self.setting: str = by
        self.known = known
        self.kind: str = by
        self.names: list[int | str] = []
        self.count = 0
        self.expected = 0  # nodes that were connected when a resumed run was saved
        self.online: dict[int, int] = {}  # client to node id
        self._sizes: dict[int, int] = {}  # of clients, where known
        self._answers: dict[int, Mapping[str, Any]] = {}  # by node id
        self._tries = Counter[int]()
        self._looks = 0
        self._unnamed: set[int] = set()  # nodes that the log already says are left out

    def state(self) -> dict[str, Any]:
        """What a restart must know, as JSON types."""
        online = len(self.online)
        return {"kind": self.kind, "names": self.names, "count": self.count, "online": online}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on with the clients of a state."""
        if self.kind not in ("auto", saved["kind"]):
            raise ValueError(
                f"nodes={self.kind!r}: the run to go on with told nodes apart by {saved['kind']!r}"
            )
        kind, names, count = saved["kind"], list(saved["names"]), whole_number(saved["count"])
        known = kind in KINDS and all(isinstance(name, int | str) for name in names)
        if not known or count > (MOST if kind == "partition-id" else len(names)):
            raise ValueError(f"{count} clients, told apart by {kind!r}, cannot be")
        self.expected = whole_number(saved["online"])
        self.kind, self.names, self.count = kind, names, count

    def name(self, client: int) -> int | str:
        """The client's name in the records."""
        return client if self.kind == "partition-id" else self.names[client]

    def label(self, client: int) -> str:
        """The client's name, and its node's id where that is another."""
        name, node = self.name(client), self.online.get(client)
        return f"{name}" if node in (None, name) else f"{name} (node {node})"

    def refresh(self, grid: Grid, timeout: float) -> None:
        """Finds out which nodes are connected, and which clients they are."""
        self._looks += 1
        connected = {info.node_id: info for info in grid.get_nodes()}
        self.online = {k: node for k, node in self.online.items() if node in connected}
        known = set(self.online.values())
        new = [info for node, info in connected.items() if node not in known]
        if new and self.kind == "auto":
            self.kind = self._decide(grid, new, timeout)
        if new and self.kind == "partition-id":
            self._ask(grid, [info.node_id for info in new], timeout)
        if new:
            self._admit(new)

    def size(self, grid: Grid, client: int, timeout: float) -> int:
        """A client's number of samples; asked of all connected nodes at once."""
        if client not in self.online:
            return 1  # nobody who could be drawn
        if client not in self._sizes:
            self._ask(grid, list(self.online.values()), timeout)
            known: dict[int, int] = {}
            for k, node in self.online.items():
                size = as_number(self._answers.get(node, {}).get("num-examples"))
                if size is not None and 1 <= size <= 1e15:
                    known[k] = int(size)
            most = largest_usual(known.values())
            self._sizes = {k: size for k, size in known.items() if size <= most}
        if client not in self._sizes:
            raise NoSize(client, self.name(client))
        return self._sizes[client]

    def _decide(self, grid: Grid, new: Sequence[NodeInfo], timeout: float) -> str:
        """The first kind by which all nodes differ. A key may be made up for this run.

        Of partition-ids it is enough if most that answered have one: the others are left out.
        """
        if self._distinct(new, "name"):
            return "name"
        if self.known and self._one_answers(grid, new, timeout):
            self._ask(grid, [info.node_id for info in new], timeout)
            answered = [info.node_id for info in new if info.node_id in self._answers]
            places = Counter(self._partition(node) for node in answered)
            distinct = sum(times == 1 for place, times in places.items() if place is not None)
            if 2 * distinct > len(answered):
                return "partition-id"
        kind = "key" if self._distinct(new, "key") else "id"
        if self.known:
            log.warn(
                "Nodes have no names and do not each tell a partition-id: they are known by their "
                "%ss, in this run alone. Register them by name, or answer %s.",
                kind,
                HANDLER,
            )
        return kind

    def _one_answers(self, grid: Grid, new: Sequence[NodeInfo], timeout: float) -> bool:
        """Whether the first node that answers at all can; a simulation logs a page for each not."""
        for info in new:
            self._ask(grid, [info.node_id], timeout, quietly=True)
            if info.node_id in self._answers:
                return bool(self._answers[info.node_id])
        return False

    def _distinct(self, nodes: Sequence[NodeInfo], kind: str) -> bool:
        names = {self._name_of(info, kind) for info in nodes}
        return None not in names and len(names) == len(nodes)

    def _name_of(self, info: NodeInfo, kind: str) -> int | str | None:
        if kind == "partition-id":
            return self._partition(info.node_id)
        if kind == "key":
            key = info.public_key
            return hashlib.sha256(key).hexdigest()[:16] if key else None
        return info.name or None if kind == "name" else info.node_id

    def _admit(self, new: Sequence[NodeInfo]) -> None:
        """Gives new nodes, by their names, the places of clients; one without is left out."""
        names: dict[int, int | str] = {}
        for info in new:
            node, name = info.node_id, self._name_of(info, self.kind)
            if name is not None:
                names[node] = name
            elif node not in self._unnamed:
                self._unnamed.add(node)
                log.warn("Node %d has no %s: it is left out", node, self.kind)
        if not names and not self.count:
            way_out = f"answer {HANDLER}" if self.kind == "partition-id" else "register it with one"
            raise ValueError(f"nodes={self.kind!r}: no node has a {self.kind}; {way_out}")
        for name, times in Counter(names.values()).items():
            if times > 1 and self.setting == self.kind and not self.count:
                raise ValueError(
                    f"{times} nodes have the {self.kind} {name!r}: give each its own, or tell them "
                    f"apart otherwise with nodes=..., one of {', '.join(KINDS)}"
                )
        self.names += sorted(set(names.values()) - set(self.names), key=str)
        by_name = {name: k for k, name in enumerate(self.names)}
        for node, name in names.items():
            client = int(name) if self.kind == "partition-id" else by_name[name]
            if (other := self.online.setdefault(client, node)) != node:  # until that is gone
                log.warn("Node %d has the %s %r of node %d", node, self.kind, name, other)
        self.count = max([self.count, len(self.names), *(k + 1 for k in self.online)])

    def _partition(self, node: int) -> int | None:
        place = self._answers.get(node, {}).get("partition-id")
        usable = isinstance(place, int) and not isinstance(place, bool) and 0 <= place < MOST
        return place if usable else None

    def _ask(
        self, grid: Grid, nodes: Sequence[int], timeout: float, *, quietly: bool = False
    ) -> None:
        """Queries nodes that have not answered yet and may."""
        again = self._looks % AGAIN == 0
        silent = [node for node in nodes if node not in self._answers]
        asked = [node for node in silent if again or self._tries[node] < TRIES]
        self._tries.update(asked)
        content = RecordDict({"config": ConfigRecord()})
        messages = [Message(content, node, QUERY) for node in asked]
        wrong: dict[int, str] = {}
        for place, reply in Replies(grid, messages, min(timeout, ANSWER_TIMEOUT)).each():
            try:
                self._answers[asked[place]] = dict(read(reply)[0])
            except Unusable as reason:
                wrong[asked[place]] = str(reason)
                if not isinstance(reply, str) and not is_gone(reply):
                    self._answers[asked[place]] = {}  # it cannot; one that was silent may later
        if wrong and not quietly:
            node, reason = next(iter(wrong.items()))
            log.warn(
                "%d of %d nodes do not answer %s: %d, %s",
                len(wrong),
                len(asked),
                QUERY,
                node,
                reason,
            )


def largest_usual(values: Collection[float]) -> float:
    """The largest number of samples that can be meant, by those of at least three clients."""
    return UNUSUAL * statistics.median_high(values) if len(values) > 2 else math.inf
