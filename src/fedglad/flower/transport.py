"""Sends messages and pulls their replies one by one, in the messages' order."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flwr.app import Message, Metadata
from flwr.serverapp import Grid

from fedglad.flower import log

SHORTEST, LONGEST = 0.05, 1.0  # seconds between two looks for a reply
AGAIN = 30.0  # seconds after which it is said again that nodes are waited for
REFUSED = "the message could not be sent: it is too large, or its node has gone"
HURRIED = ", in which most others had replied"
SETTLED = 2.0  # seconds in which no node comes: a simulation has them all by then

Found = Message | str
"""A reply, or the reason why there is none."""


class Replies(Sequence[Message]):
    """The replies to messages, which are sent at once; each is pulled when it is asked for.

    By `each`, which also tells whose a reply is and why others did not come, the memory here is
    that of one: those of others wait in the SuperLink. Who looks at it as at a list, of the
    messages that came, has all of them in memory. All have the same time, counted from now.
    """

    def __init__(
        self,
        grid: Grid,
        messages: Sequence[Message],
        timeout: float,
        quorum: float = 1.0,
        grace: float = 0.0,
    ) -> None:
        """Once `quorum`, a share, have come, the others have `grace` seconds left."""
        self.metadata: list[Metadata] = [message.metadata for message in messages]
        sent: list[str | None] = list(grid.push_messages(messages))  # ids; None: refused
        if len(sent) != len(messages):  # some grids leave out what was refused
            ids = [metadata.message_id for metadata in self.metadata]
            sent = [message_id if message_id in sent else None for message_id in ids]
        self._kept: list[tuple[int, Found]] | None = None
        self._grid, self._sent = grid, sent
        self._begin = time.monotonic()
        self._deadline = self._begin + timeout
        self._enough = math.ceil(quorum * len(sent) - 1e-9) if quorum < 1 else len(sent)
        self._grace, self._hurried = grace, False

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, place: Any) -> Any:
        return self._messages[place]

    @property
    def _messages(self) -> list[Message]:
        self._kept = list(self.each()) if self._kept is None else self._kept
        return [found for _, found in self._kept if not isinstance(found, str)]

    def each(self) -> Iterator[tuple[int, Found]]:
        """(place, reply or reason): in the messages' order, with a quorum as they come."""
        if self._kept is not None:
            yield from self._kept
            return
        pull = self._in_order() if self._enough == len(self._sent) else self._as_they_come()
        for place, replies in pull:
            if replies:
                yield place, replies.pop(0)  # nothing here keeps it alive
            else:
                yield place, self._reason(place)

    def _reason(self, place: int) -> str:
        if not self._sent[place]:
            return REFUSED
        hurried = HURRIED if self._hurried else ""
        return f"no reply within {self._deadline - self._begin:.6g} s{hurried}"

    def _pull(self, message_id: str | None) -> list[Message]:
        return list(self._grid.pull_messages([message_id])) if message_id else []

    def _in_order(self) -> Iterator[tuple[int, list[Message]]]:
        for place, message_id in enumerate(self._sent):
            pause = SHORTEST
            while not (replies := self._pull(message_id)) and message_id:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    break
                time.sleep(min(pause, left))
                pause = min(1.5 * pause, LONGEST)
            yield place, replies

    def _as_they_come(self) -> Iterator[tuple[int, list[Message]]]:
        waiting = {place: message_id for place, message_id in enumerate(self._sent) if message_id}
        came, pause = 0, SHORTEST
        while waiting:
            before = came
            for place, message_id in list(waiting.items()):
                if replies := self._pull(message_id):
                    del waiting[place]
                    came += 1
                    yield place, replies
            if came >= self._enough:
                deadline = time.monotonic() + self._grace
                self._hurried = deadline < self._deadline
                self._deadline = min(self._deadline, deadline)
                self._enough = len(self._sent) + 1  # the grace time begins once
            left = self._deadline - time.monotonic()
            if left <= 0:
                break
            pause = SHORTEST if came > before else min(1.5 * pause, LONGEST)
            if waiting:
                time.sleep(min(pause, left))
        for place, message_id in enumerate(self._sent):
            if place in waiting or not message_id:
                yield place, []


def matched(
    sent: Sequence[Metadata], replies: Iterable[Message], missing: Sequence[str]
) -> Iterator[tuple[int, Found]]:
    """(place, reply or its reason of `missing`) of replies that came in any order.

    One of a node that failed names no sender: only the message that it answers tells whose it is.
    """
    by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
    by_node = {reply.metadata.src_node_id: reply for reply in by_id.values()}
    for place, metadata in enumerate(sent):
        reply = by_id.get(metadata.message_id) or by_node.get(metadata.dst_node_id)
        yield place, reply or missing[place]


def is_simulated(grid: Grid) -> bool:
    """Whether the nodes are those of Flower's simulation engine: no other will ever connect."""
    return type(grid).__name__ == "InMemoryGrid"


def wait_for(grid: Grid, wanted: int, timeout: float, *, first: bool = False) -> int:
    """How many nodes are connected, once they are enough, time is up or no more can come.

    Those of a simulation join one by one when it begins: at `first` they are waited for.
    """
    begin = said = settled = time.monotonic()
    before, simulated = -1, is_simulated(grid)
    while True:
        count, now = len(list(grid.get_node_ids())), time.monotonic()
        if count >= wanted and (count == before or not (simulated and first)):
            return count
        settled = now if count != before else settled
        if now - begin >= timeout or (simulated and now - settled >= SETTLED):
            return count
        if count < wanted and (count != before or now - said >= AGAIN):
            left = "" if math.isinf(timeout) else f"; {begin + timeout - now:.0f} s are left"
            log.info("Waiting for nodes to connect: %d of %d%s", count, wanted, left)
            said = now
        before = count
        time.sleep(0.1 if simulated else 1.0)


def pause(seconds: float) -> None:
    """Lets time pass."""
    time.sleep(seconds)


def clock() -> float:
    """Seconds, from some moment on."""
    return time.monotonic()
