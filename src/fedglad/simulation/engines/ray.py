"""Workers on the machines of a Ray cluster.

θ is put once a round, and each machine has one copy of it. A worker is sent whole blocks of the
cohort, and answers with their sums, where there are enough blocks for all workers; else some
clients, and answers with their updates, which the server adds up. The bits are the same. At most
2 × workers messages are out or waiting to be taken, and no more than a third of what the machines'
object stores hold. A worker that dies is replaced, and what it had to do is done again.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedglad.clients.method import Memory
from fedglad.clients.workbench import Workbench
from fedglad.core import batch, user_code
from fedglad.core.cluster import Cluster
from fedglad.core.processes import TRIES, Lost
from fedglad.core.threads import threads
from fedglad.records import POSITIONS, Failure, Several
from fedglad.server.rule import Rule
from fedglad.simulation.engines.base import (
    GROUP_BYTES,
    Arrivals,
    EngineLost,
    Held,
    Job,
    Packed,
    held_sets,
    logger,
)
from fedglad.simulation.engines.local import SHARE
from fedglad.simulation.engines.trainer import (
    About,
    Carried,
    Member,
    Sent,
    Trained,
    Trainer,
    arrays,
    tensors,
)
from fedglad.tasks.base import added, chunk_of, finished

if TYPE_CHECKING:
    from fedglad.simulation.engines.settings import Ray

QUEUE = 2  # messages that a worker has, so that it need not wait for the next
TICK = 0.5  # seconds after which is looked again at what time has run out, and who is there
ASKED = 64  # clients of a message that asks for losses or scores
SPLIT = 2  # times that a message is lost before its clients are sent one by one


@dataclass(eq=False)
class Message:
    """Something to do for a worker, and in the end its answer."""

    kind: str
    args: tuple[Any, ...]
    members: list[Member] = field(default_factory=list[Member])
    summed: bool = False
    deaths: int = 0
    answer: Any = None
    done: bool = False

    def split(self) -> list["Message"]:
        """The same for each client by itself: one of them may be what ends the workers."""
        return [replace(self, members=[one], summed=False, deaths=0) for one in self.members]


@dataclass(eq=False)
class Hand:
    """A worker, and the messages it was sent, the oldest first."""

    actor: Any
    starting: Any  # what it answers when it is ready; None from then on
    at_work: deque[tuple[Message, Any]] = field(default_factory=deque[tuple[Message, Any]])
    since: float = 0.0  # when it began with the first


class RayEngine:
    """Engine and pool in one: it has messages done, in order, by whoever is there."""

    sums = True  # a `Rule` is of use to it

    def __init__(self, job: Job, settings: "Ray") -> None:
        self.job, self.settings = job, settings
        bench = Workbench(job.build(), job.task)  # refuses what cannot be trained
        self.layout, self.task = bench.layout, bench.task
        held = held_sets(job.data, self.layout.dtype)
        self.sizes = {name: batch.length(x) for name, (x, _) in held.items()}
        self.hands: list[Hand] = []
        self.others: set[str] = set()  # CPU types that were said
        self.cluster = Cluster(settings.address)
        self.ray: Any = self.cluster.ray
        try:
            self.store = self._room()
            self._send_by_value(_parts_of(job))
            self.here = None
            if job.source:
                self.here = About.here(job.data)
            self.job_ref = self.ray.put(self._job_to_send())
            options = {"num_cpus": settings.cpus, "num_gpus": settings.gpus, "max_restarts": 0}
            self.make = self.ray.remote(Trainer).options(**options)
            self._wait_for_one()
        except BaseException:
            self.close()
            raise

    def train(
        self,
        t: int,
        cohort: Sequence[int],
        packed: Packed,
        sent: Memory,
        rule: Rule | None = None,
    ) -> Arrivals:
        self._hire()
        workers = max(1, len(self.hands))
        size = self.layout.size * self.layout.dtype.itemsize
        blocks = -(-len(cohort) // POSITIONS)
        enough = workers == 1 or blocks >= 2 * workers  # else some would have nothing to do
        summed = bool(rule) and not self.settings.client_timeout and enough
        most = max(1, GROUP_BYTES // size)  # units of a message: blocks, or clients
        units, unit = (blocks, POSITIONS) if summed else (len(cohort), 1)
        count = min(most, max(1, -(-units // (SHARE * workers)))) * unit
        if self.settings.client_timeout:
            count = 1  # who hangs must be told from the others
        if rule and summed:
            self._send_by_value([rule.filter, rule.weighting, rule.trust])
        ref = self.ray.put(Sent.of(packed, t, sent, rule if summed else None))
        messages = [
            Message("train", (ref,), self._members(some), summed) for some in _parts(cohort, count)
        ]
        room = size * (1 if summed else count)
        if self.job.memories is not None:
            room += 2 * size * count
        with threads(1):  # also for the caller, between messages: the workers may be here
            for message in self._done(messages, room):
                yield from self._groups(t, message)

    def _groups(self, t: int, message: Message) -> Arrivals:
        answer = message.answer
        if isinstance(answer, Lost):
            yield Several(Failure(client, answer.reason) for client, _ in message.members)
            return
        assert isinstance(answer, Trained)
        for client, memory in answer.memories.items():
            self.job.memories.propose(client, t, tensors(memory))
        yield from answer.opened()

    def evaluate(self, packed: Packed, held: Held = "test") -> dict[str, float]:
        starts = range(0, self.sizes[held], chunk_of(self.task))
        self._hire()
        ref = self.ray.put(Sent.of(packed))
        count = max(1, -(-len(starts) // (SHARE * max(1, len(self.hands)))))
        messages = [Message("evaluate", (ref, held, list(p))) for p in _parts(starts, count)]
        sums: list[Any] = []
        for message in self._done(messages):
            if isinstance(message.answer, Lost):
                reason = message.answer.reason
                raise RuntimeError(f"the {held} set could not be evaluated: {reason}")
            sums += message.answer
        return finished(self.task, added(sums))

    def evaluate_clients(
        self, packed: Packed, clients: Sequence[int]
    ) -> list[dict[str, float] | None]:
        def lost(client: int, reason: str) -> None:
            logger.warning("client %s could not be tested: %s", client, reason)

        return self._ask("evaluate_clients", packed, clients, lost)

    def losses(self, clients: Sequence[int], packed: Packed) -> list[float]:
        return self._ask("losses", packed, clients, lambda client, reason: math.nan)

    def _ask(
        self,
        what: str,
        packed: Packed,
        clients: Sequence[int],
        lost: Callable[[int, str], Any],
    ) -> list[Any]:
        self._hire()
        ref = self.ray.put(Sent.of(packed))
        count = min(ASKED, max(1, -(-len(clients) // (SHARE * max(1, len(self.hands))))))
        count = 1 if self.settings.client_timeout else count
        messages = [Message(what, (ref,), self._members(p)) for p in _parts(clients, count)]
        found: list[Any] = []
        for message in self._done(messages):
            answer = message.answer
            if isinstance(answer, Lost):
                answer = [lost(client, answer.reason) for client, _ in message.members]
            found += answer
        return found

    def close(self) -> None:
        for hand in self.hands:
            self._dismiss(hand)
        self.hands = []
        self.cluster.close()

    def _send_by_value(self, things: Sequence[Any]) -> None:
        """Has the modules sent that a user's own objects come from: no other machine has them."""
        for module in user_code.own_modules(things):
            self.ray.cloudpickle.register_pickle_by_value(module)

    def _members(self, clients: Sequence[int]) -> list[Member]:
        """Each client with what it remembers; that is read when the message is sent."""
        return [(client, {}) for client in clients]

    def _remembered(self, members: Sequence[Member]) -> list[Member]:
        if (memories := self.job.memories) is None:
            return [*members]
        read = ((client, memories.read(client, memories.version(client))) for client, _ in members)
        return [(client, arrays(memory)) for client, memory in read]

    # ----------------------------------------------------------------------------------- the pool

    def _done(self, messages: list[Message], room: int = 0) -> Iterator[Message]:
        """The messages with their answers, in order; `room` is what an answer takes, in bytes."""
        order, unsent = deque(messages), deque(messages)
        self._drop_work()  # of a round that was given up
        try:
            while order:
                self._send(order, unsent, room)
                while not order[0].done:
                    try:
                        self._receive(order, unsent)
                    except EngineLost:
                        if order[0].kind == "train":
                            raise
                        self._do_here(order, unsent)
                    self._send(order, unsent, room)
                yield order.popleft()
        finally:
            self._drop_work()

    def _do_here(self, order: deque[Message], unsent: deque[Message]) -> None:
        """Measures in this process what nobody else can: a round that was trained is not lost."""
        unsent.clear()
        with threads(1):
            trainer = Trainer(self._job_to_send())
            for message in [message for message in order if not message.done]:
                sent, *rest = message.args
                rest += [self._remembered(message.members)] if message.members else []
                message.answer = getattr(trainer, message.kind)(self.ray.get(sent), *rest)
                message.done = True

    def _job_to_send(self) -> Job:
        """What clients remember stays here, and goes along with the messages."""
        memories = None if self.job.memories is None else Carried()
        return replace(self.job, memories=memories)

    def _send(self, order: deque[Message], unsent: deque[Message], room: int) -> None:
        """Gives everybody something to do, as far as the window goes."""
        ready = [hand for hand in self.hands if hand.starting is None]
        most = 2 * max(1, len(ready))
        if room:
            most = max(1, min(most, self.store // (3 * room)))
        queue = 1 if self.settings.client_timeout else QUEUE
        while unsent and ready:
            out = sum(len(hand.at_work) for hand in self.hands)
            out += sum(message.done for message in order)
            hand = min(ready, key=lambda hand: len(hand.at_work))
            first = unsent[0] is order[0]
            if len(hand.at_work) >= queue or (out >= most and not first):
                return
            message = unsent.popleft()
            if not hand.at_work:
                hand.since = time.monotonic()
            hand.at_work.append((message, self._sent(hand, message)))

    def _sent(self, hand: Hand, message: Message) -> Any:
        call = getattr(hand.actor, message.kind).remote
        args = list(message.args)
        if message.members:
            args.append(self._remembered(message.members))
        return call(*args, **({"summed": message.summed} if message.kind == "train" else {}))

    def _receive(self, order: deque[Message], unsent: deque[Message]) -> None:
        """Takes what has come; what was lost is to be sent again."""
        firsts = {hand.at_work[0][1]: hand for hand in self.hands if hand.at_work}
        firsts |= {hand.starting: hand for hand in self.hands if hand.starting is not None}
        if not firsts:
            self._wait_for_one()
            return
        ready, _ = self.ray.wait([*firsts], num_returns=1, timeout=TICK)
        more = [ref for ref in firsts if ref not in ready]
        if more:
            ready += self.ray.wait(more, num_returns=len(more), timeout=0)[0]
        for ref in ready:
            hand = firsts[ref]
            if hand.starting is not None:
                self._welcome(hand)
                continue
            message, _ = hand.at_work[0]
            try:
                message.answer = self.ray.get(ref)
            except self.cluster.deaths as error:
                self._lose(hand, str(error), order, unsent)
                continue
            hand.at_work.popleft()
            hand.since = time.monotonic()
            message.done = True
        self._look_at_the_clock(order, unsent)

    def _look_at_the_clock(self, order: deque[Message], unsent: deque[Message]) -> None:
        timeout = self.settings.client_timeout
        for hand in [*self.hands]:
            if hand.at_work and time.monotonic() - hand.since > timeout > 0:
                message, _ = hand.at_work[0]
                if message.kind != "evaluate":
                    message.answer, message.done = Lost(f"no answer within {timeout:g} s"), True
                self._lose(hand, "no answer", order, unsent)

    def _lose(self, hand: Hand, why: str, order: deque[Message], unsent: deque[Message]) -> None:
        """A worker has died, or was given up: what it had to do goes to others."""
        self._dismiss(hand)
        self.hands.remove(hand)
        logger.info("a worker was lost: %s", why.splitlines()[0] if why else "")
        again: list[Message] = []
        for k, (message, _) in enumerate(hand.at_work):
            if message.done:
                continue
            message.deaths += k == 0
            if message.deaths >= SPLIT and len(message.members) > 1:
                parts = message.split()
                at = order.index(message)
                order.remove(message)
                for offset, part in enumerate(parts):
                    order.insert(at + offset, part)
                again += parts
            elif message.deaths >= TRIES:
                message.answer, message.done = Lost(f"its worker died {message.deaths} times"), True
            else:
                again.append(message)
        # In the cohort's order, whoever was lost first: the one that is waited for goes out first.
        left = {id(message) for message in (*again, *unsent)}
        unsent.clear()
        unsent.extend(message for message in order if id(message) in left)
        self._hire()
        if not self.hands:
            self._wait_for_one()

    def _drop_work(self) -> None:
        """Ends who is still at work on what nobody waits for."""
        for hand in [hand for hand in self.hands if hand.at_work]:
            self._dismiss(hand)
            self.hands.remove(hand)
        self._hire()

    # -------------------------------------------------------------------------------- the workers

    def _hire(self) -> None:
        """As many workers as there are to be, of what the cluster has now."""
        settings = self.settings
        if settings.workers != "auto":
            missing = settings.workers - len(self.hands)
        else:
            free = self.ray.available_resources()
            rooms = [free.get("CPU", 0) / settings.cpus]
            if settings.gpus:
                rooms.append(free.get("GPU", 0) / settings.gpus)
            starting = sum(hand.starting is not None for hand in self.hands)
            missing = int(min(rooms) + 1e-6) - starting
            # What is free is told late: there are never more than all machines have room for.
            most = int(self.ray.cluster_resources().get("CPU", 0) / settings.cpus + 1e-6)
            missing = min(missing, most - len(self.hands))
        for _ in range(missing):
            actor = self.make.remote(self.job_ref, gpu=settings.gpus > 0)
            self.hands.append(Hand(actor, actor.about.remote()))

    def _wait_for_one(self) -> None:
        """Until a worker is ready; EngineLost if the cluster has no room for one in time."""
        end = time.monotonic() + self.settings.patience
        while not any(hand.starting is None for hand in self.hands):
            if time.monotonic() > end:
                raise EngineLost(
                    f"no worker could be started for {self.settings.patience:g} s: the cluster "
                    f"has {_shown(self.ray.available_resources())} free, and a worker takes "
                    f"{self.settings.cpus:g} CPU and {self.settings.gpus:g} GPU "
                    "(engine.cpus, engine.gpus, engine.patience)"
                )
            self._hire()
            starting = {hand.starting: hand for hand in self.hands if hand.starting is not None}
            if not starting:
                time.sleep(TICK)
                continue
            for ref in self.ray.wait([*starting], num_returns=1, timeout=TICK)[0]:
                self._welcome(starting[ref])

    def _welcome(self, hand: Hand) -> None:
        """A worker says that it is ready, or why it cannot be."""
        try:
            about: About = self.ray.get(hand.starting)
        except self.cluster.deaths as error:
            self.hands.remove(hand)
            cause = getattr(error, "cause", None) or _cause_of(error)
            if cause:
                raise ValueError(f"a worker cannot begin: {cause}") from error
            return
        hand.starting = None
        if not self.here:
            return
        if about.data != self.here.data:
            name = type(self.job.data).__name__
            raise ValueError(
                f"the data on {about.node} are other ones than here ({name}, checksum "
                f"{about.data}, not {self.here.data}): bring the same to it, with `fedglad data "
                "get NAME` there, or share a cache folder ($FEDGLAD_CACHE)"
            )
        if about.cpu != self.here.cpu and about.cpu not in self.others:
            self.others.add(about.cpu)
            logger.warning(
                "%s has another type of CPU (%s) than this machine (%s): the last bits of the "
                "results may differ from those of one type",
                about.node,
                about.cpu,
                self.here.cpu,
            )

    def _dismiss(self, hand: Hand) -> None:
        try:
            self.ray.kill(hand.actor)
        except Exception as error:  # it has gone, and perhaps the cluster with it
            logger.debug("a worker could not be ended: %s", error)

    def _room(self) -> int:
        """What the machines' object stores hold together, in bytes."""
        return int(self.ray.cluster_resources().get("object_store_memory", 1 << 30))


def _parts(items: Sequence[Any], count: int) -> Iterator[Sequence[Any]]:
    return (items[k : k + count] for k in range(0, len(items), count))


def _shown(free: dict[str, float]) -> str:
    return ", ".join(f"{free.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))


def _parts_of(job: Job) -> list[Any]:
    """What of a job may be a user's own."""
    return [job.client, job.task, job.data, *job.model.modules()]


def _cause_of(error: Exception) -> str:
    """What a worker raised when it was made, in a line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    made = [line for line in lines if "Error: " in line and not line.startswith("The actor")]
    return made[-1].strip() if made else ""
