"""Sends messages and pulls their replies one by one, in the messages' order."""

import time
from collections.abc import Iterable, Iterator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedglad.flower import log

SHORTEST, LONGEST = 0.05, 1.0  # seconds between two looks for a reply


def exchange(grid: Grid, messages: Sequence[Message], timeout: float) -> Iterator[Message | None]:
    """The replies in the messages' order, None for one that did not come in time.

    Each is pulled when it is asked for: those of others wait in the SuperLink, so the memory here
    is that of one reply. All have the same time, counted from now.
    """
    sent: list[str | None] = list(grid.push_messages(messages))  # ids; None: refused
    if len(sent) != len(messages):  # some grids leave out what was refused
        ids = [message.metadata.message_id for message in messages]
        sent = [message_id if message_id in sent else None for message_id in ids]
    return _pull(grid, sent, time.monotonic() + timeout)


def _pull(grid: Grid, sent: list[str | None], deadline: float) -> Iterator[Message | None]:
    for message_id in sent:
        replies: list[Message] = []
        pause = SHORTEST
        while message_id and not (replies := list(grid.pull_messages([message_id]))):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, LONGEST)
        yield replies.pop(0) if replies else None  # nothing here keeps it alive


def wait_for(grid: Grid, wanted: int, timeout: float) -> int:
    """How many nodes are connected, once they are enough or time is up."""
    deadline, before = time.monotonic() + timeout, -1
    while (count := len(list(grid.get_node_ids()))) < wanted:
        if count != before:
            log.info("Waiting for nodes to connect: %d of %d", count, wanted)
        before = count
        if time.monotonic() >= deadline:
            break
        time.sleep(1.0)
    return count


def in_order(
    messages: list[Message], replies: Iterable[Message | None]
) -> Iterator[Message | None]:
    """The replies in the order of the messages; one of a node that failed names no sender."""
    by_id = {reply.metadata.reply_to_message_id: reply for reply in replies if reply}
    by_node = {reply.metadata.src_node_id: reply for reply in by_id.values()}
    for message in messages:
        reply = by_id.get(message.metadata.message_id)
        yield reply or by_node.get(message.metadata.dst_node_id)
