"""For Flower clients: masks what they train, so that the server can see nothing but sums.

Imports NumPy and cryptography, neither torch nor flwr before it is used.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedglad.federation.metrics import loss_of
from fedglad.secure import Refused, SecureClient
from fedglad.secure.contents import pack
from fedglad.secure.fixed import as_bytes

if TYPE_CHECKING:
    from flwr.app import Array, Context, Message, RecordDict

SECURE = "fedglad.secure"
"""The ConfigRecord with the protocol's part of a message, and of what a client keeps of a round."""

VECTOR = "masked"
"""The record, and the one array in it, that is the masked vector."""


def secure_sum(
    msg: "Message", ctxt: "Context", call_next: "Callable[[Message, Context], Message]"
) -> "Message":
    """A mod that answers the messages of a secure sum, and masks the reply, for `report="secure"`.

    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp()
    >>> @app.train(mods=[secure_sum])
    ... def train(message, context): ...

    It stands first, that is outermost. The function below it is called once a round, as ever, and
    replies as ever: one ArrayRecord of the arrays sent and one MetricRecord. Of this reply nothing
    leaves the client but under masks: the update, its norms, weight, loss and buffers; other
    metrics stay here. A message that asks for more than the protocol allows is answered by an error
    that says what was refused, and so is one that asks for an unmasked update.

    Between messages the round's secrets are in the context's state, on the client's machine alone;
    with the last message they are gone.
    """
    from flwr.app import Error
    from flwr.app import Message as Reply
    from flwr.common.constant import ErrorCode

    if msg.metadata.message_type.partition(".")[0] != "train":
        return call_next(msg, ctxt)
    try:
        content = _answered(msg, ctxt, call_next)
    except Refused as reason:
        return Reply(Error(ErrorCode.MOD_FAILED_PRECONDITION, str(reason)), reply_to=msg)
    return Reply(content, reply_to=msg)


def _answered(
    msg: "Message", ctxt: "Context", call_next: "Callable[[Message, Context], Message]"
) -> "RecordDict":
    from flwr.app import ConfigRecord, RecordDict

    asked = msg.content.get(SECURE)
    if not isinstance(asked, ConfigRecord):
        raise Refused(
            "this client's updates leave it masked or not at all (secure_sum), and the server asks "
            'for a plain one: it needs FedGLAD(report="secure")'
        )
    del msg.content[SECURE]  # what is below sees the message that it knows
    kept = ctxt.state.get(SECURE)
    client = SecureClient(kept if isinstance(kept, ConfigRecord) else None)
    stage = asked.get("stage")
    try:
        if stage == "masked":
            client.receive(asked)
            return _masked(client, asked, msg, ctxt, call_next)
        steps = {"keys": client.keys, "shares": client.shares, "unmask": client.unmask}
        if stage not in steps:
            raise Refused(f"{str(stage)[:40]!r} is no message of a secure sum")
        return RecordDict({SECURE: ConfigRecord(steps[stage](asked))})
    finally:  # also what a refused message has not changed
        if client.state:
            ctxt.state[SECURE] = ConfigRecord(client.state)
        else:
            ctxt.state.pop(SECURE, None)


def _masked(
    client: SecureClient,
    asked: "Mapping[str, Any]",
    msg: "Message",
    ctxt: "Context",
    call_next: "Callable[[Message, Context], Message]",
) -> "RecordDict":
    """What the function below replies, masked. A client that fails here is out of the round."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    state, client.state = client.state, {}
    sent = _numpy(_only("message", msg.content.array_records))
    reply = call_next(msg, ctxt)
    if reply.has_error():
        raise Refused(str(reply.error.reason or reply.error.code))
    trained = _numpy(_only("reply", reply.content.array_records))
    metrics = _only("reply", reply.content.metric_records)
    body, numbers = pack(
        sent,
        trained,
        asked["parameters"],
        asked["buffers"],
        weight=_weight(asked, metrics),
        loss=loss_of(metrics),
        point=SecureClient(state).point,
    )
    del sent, trained, reply
    client.state = state
    body, numbers = client.mask(body, numbers)
    told = {"session": state["session"], "numbers": as_bytes(numbers)}
    vector = ArrayRecord({VECTOR: Array(body)})
    return RecordDict({SECURE: ConfigRecord(told), VECTOR: vector})


def _weight(asked: Mapping[str, Any], metrics: Mapping[str, Any]) -> float:
    """The weight that the server gives this client, else its own; raises Refused."""
    if "weight" in asked:
        return float(asked["weight"])
    key = str(asked.get("weight_key"))
    value = metrics.get(key)
    if not isinstance(value, int | float):
        raise Refused(f"there is no weight: the MetricRecord has no number {key!r}")
    return float(value)


def _only(whose: str, records: Mapping[str, Any]) -> Any:
    if len(records) != 1:
        kinds = {type(record).__name__ for record in records.values()} or {"records of one kind"}
        raise Refused(f"the {whose} has {len(records)} {', '.join(kinds)}: one is expected")
    return next(iter(records.values()))


def _numpy(record: "Mapping[str, Array]") -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for name, array in record.items():
        try:
            arrays[name] = array.numpy()
        except Exception as error:  # an array can be unreadable in more ways than NumPy names
            raise Refused(f"the array {name!r} cannot be read: {error!s:.200}") from None
    return arrays
