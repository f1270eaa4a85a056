"""The server's side of a round whose updates are masked: four messages a client, over the Grid."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from fedglad.core.layout import as_tensor
from fedglad.federation.session import TrainingResult
from fedglad.flower import log
from fedglad.flower.masking import SECURE
from fedglad.flower.replies import Unusable, decoded, is_gone, only, why_not
from fedglad.flower.transport import Found, Replies
from fedglad.records import Record
from fedglad.samplers.base import Cohort, Sampler
from fedglad.secure import Round, SecureSum, TooFew, Total
from fedglad.secure.contents import unpack
from fedglad.server.compatibility import refuse_sums
from fedglad.server.from_sums import Sums
from fedglad.weights import Equal, Samples

if TYPE_CHECKING:
    from fedglad.flower.session import Session

Send = Callable[[list[Message]], Replies]


def refuse_masked(session: "Session") -> None:
    """Raises ValueError unless all parts of a run can do with sums that nobody can take apart."""
    server, sampler = session.server, session.sampler
    refuse_sums(server)
    if sampler.keeps_updates or type(sampler).observe is not Sampler.observe:
        raise ValueError(
            f"{type(sampler).__name__} looks at what single clients sent, and of masked updates "
            'there is only the sum: use another sampler, or report="updates"'
        )
    if type(server.weighting).weigh not in (Samples.weigh, Equal.weigh):
        raise ValueError(
            f"the weights of {type(server.weighting).__name__} are computed here, and clients "
            "weigh their updates themselves before they mask them: use Samples or Equal"
        )


def session_name(grid: Grid, t: int) -> str:
    """A name for one attempt at round t: no other, of any run, has it."""
    return f"run {grid.run.run_id}, round {t + 1}, {secrets.token_hex(8)}"


class MaskedRound:
    """One round: `open` exchanges keys and shares, `close` takes in the masked vectors and unmasks.

    In between the messages by which clients train are sent and answered as in any round. A client
    that is gone by then, or later, is `rejected` in the record with the reason; with fewer than the
    threshold the round is skipped.
    """

    def __init__(self, session: "Session", cohort: Cohort, settings: SecureSum, send: Send) -> None:
        self.session, self.cohort, self._settings, self._send = session, cohort, settings, send
        self._round: Round | None = None
        self._reason = ""  # why there is no sum
        self.accepted: set[int] = set()  # the clients that are in it

    def open(
        self, arrays: ArrayRecord, config: ConfigRecord, name: str
    ) -> tuple[Cohort, list[Message]]:
        """Who has exchanged keys and shares, and the messages to train; nobody, if too few have."""
        try:
            # Not only by `step_sums`: a sum that is seen and not used is a sum that is seen.
            least, clients = self.session.server.min_clients, len(self.cohort.ids)
            round = self._round = Round(self._settings, name, clients, least=least)
            asked = round.take_keys(self._exchanged(round.ask_keys()))
            asked = round.take_shares(self._exchanged(asked))
        except TooFew as few:
            self._reason = str(few)
            return Cohort(()), []
        ids = [self.cohort.ids[place - 1] for place in asked]
        plain = self.session.messages(ids, arrays, config, MessageType.TRAIN)
        messages = [
            self._message(place, {**told, **self._told(place)}, message.content)
            for message, (place, told) in zip(plain, asked.items(), strict=True)
        ]
        return Cohort(tuple(ids)), messages

    def close(self, cohort: Cohort, found: Iterator[tuple[int, Found]]) -> TrainingResult:
        """One step by the sum of those of the cohort who sent a vector."""
        session = self.session
        total = self._total(cohort, found)
        entries = self._entries(total)
        population = len(session.directory.names)
        if total is None:
            record, alarm = session.observed(
                self.cohort.ids, Record("skipped", self._reason, entries)
            )
            return TrainingResult(record, [], alarm)
        self.accepted = {self.cohort.ids[place - 1] for place in total.clients}
        sums = self._sums(total)
        record = session.server.step_sums(sums, population=population, clients=entries)
        record, alarm = session.observed(self.cohort.ids, record)
        metrics: dict[str, Any] = {session.weight_key: sums.weight}
        if sums.loss is not None:
            metrics["train_loss"] = sums.loss
        return TrainingResult(record, [RecordDict({"metrics": MetricRecord(metrics)})], alarm)

    def _total(self, cohort: Cohort, found: Iterator[tuple[int, Found]]) -> Total | None:
        if self._reason:
            return None
        assert self._round is not None
        round, places = self._round, {k: at for at, k in enumerate(self.cohort.ids, 1)}
        try:
            for place, message in found:
                at = places[cohort.ids[place]]
                round.take_masked(at, *self._vector(at, message))
                del message
            return round.unmask(self._exchanged(round.ask_unmask()))
        except TooFew as few:
            self._reason = str(few)
            return None

    def _vector(self, place: int, message: Found) -> tuple[Mapping[str, Any] | str, Any]:
        """What a client sent: its numbers, and the vector; or why there is none."""
        reply = self._read(place, message)
        if isinstance(reply, str):
            return reply, None
        assert not isinstance(message, str)
        try:
            (vector,) = decoded(only(message.content, ArrayRecord)).values()
        except (Unusable, ValueError):
            return "it sent no masked vector", None
        return reply, vector

    def _exchanged(self, asked: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
        """The answers to the protocol's messages, or why there is none."""
        places, messages = [*asked], [self._message(place, told) for place, told in asked.items()]
        return {places[k]: self._read(places[k], m) for k, m in self._send(messages).each()}

    def _message(
        self, place: int, told: Mapping[str, Any], rest: Mapping[str, Any] | None = None
    ) -> Message:
        content = RecordDict({**(rest or {}), SECURE: ConfigRecord(dict(told))})
        node = self.session.directory.online[self.cohort.ids[place - 1]]
        return Message(content, node, MessageType.TRAIN)

    def _read(self, place: int, message: Found) -> Mapping[str, Any] | str:
        if is_gone(message):
            self.session.gone.add(self.cohort.ids[place - 1])
        if reason := why_not(message):
            return reason
        assert not isinstance(message, str)
        reply = message.content.get(SECURE)
        return reply if isinstance(reply, ConfigRecord) else "the client needs the mod secure_sum"

    def _told(self, place: int) -> dict[str, Any]:
        """What a client must know of the model and of its own weight."""
        server, session = self.session.server, self.session
        told: dict[str, Any] = {
            "parameters": [*server.layout.names],
            "buffers": [*server.layout.buffers],
            "weight_key": session.weight_key,
        }
        if self.cohort.weights is not None:
            told["weight"] = float(server.weighting.weigh(self.cohort.weights[place - 1]))
        elif type(server.weighting).weigh is Equal.weigh:
            told["weight"] = 1.0
        return told

    def _sums(self, total: Total) -> Sums:
        server = self.session.server
        layout = server.layout
        model = {name: value.numpy() for name, value in server.state.items()}
        summed = unpack(total.body, total.numbers, model, layout.names, [*layout.buffers])
        return Sums(
            total={
                name: torch.from_numpy(value).to(layout.dtype)
                for name, value in summed.total.items()
            },
            sum_sq=summed.sum_sq,
            sum_sq2=summed.sum_sq2,
            weight=summed.weight,
            weight_sq=summed.weight_sq,
            count=len(total.clients),
            buffers={name: as_tensor(value) for name, value in summed.buffers.items()} or None,
            loss=summed.loss,
        )

    def _entries(self, total: Total | None) -> list[dict[str, Any]]:
        """The clients' lines in the record: who took part, and of the others why not."""
        left_out = self._round.left_out if self._round else {}
        entries: list[dict[str, Any]] = []
        for place, client in enumerate(self.cohort.ids, 1):
            entry: dict[str, Any] = {"id": client, "weight": None, "loss": None, "sq_norm": None}
            if place in left_out and not (total and place in total.clients):
                entry["rejected"] = left_out[place]
                name = self.session.directory.label(client)
                log.warn(
                    "Round %d: client %s left out: %s", self.session.t + 1, name, left_out[place]
                )
            entries.append(entry)
        return entries
