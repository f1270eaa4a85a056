"""A federation in progress, whoever carries its messages: what its records and its folder need."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedglad.config.schema import Config
from fedglad.core.guard import NoGuard
from fedglad.federation.metrics import accuracy_of, loss_of, numbers, plain
from fedglad.optimizers import Optimizer
from fedglad.privacy import NoPrivacy
from fedglad.records import ACCURACY, Record, Round, Score
from fedglad.simulation.driver import Driver
from fedglad.transforms import NoTransform
from fedglad.trust import NoTrust
from fedglad.weights import Samples

AVERAGED = "averaged_"
"""What the names of metrics begin with that are those of the average."""


@dataclass
class TrainingResult:
    """One round: `contents` are the accepted replies, `failed` entries of earlier attempts."""

    record: Record
    contents: list[Any] = field(default_factory=list[Any])
    alarm: str | None = None
    retried: list[str] = field(default_factory=list[str])
    failed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class Session(Driver):
    """A run whose clients are elsewhere; a subclass adds the transport."""

    hidden: ClassVar[Collection[str]] = ()  # metrics that are no user's
    score: Score = ACCURACY
    optimizer: Optimizer  # as it was given, without the number of rounds
    weighting: Samples

    @abstractmethod
    def info(self, text: str, *values: Any) -> None:
        """A line in the log of the engine that carries the messages: a user has one log to read."""

    @abstractmethod
    def warn(self, text: str, *values: Any) -> None:
        """A warning there, and in the log of the run's folder."""

    @abstractmethod
    def lost(self, text: str) -> None:
        """A warning that fedglad's own log has already."""

    @abstractmethod
    def name(self, client: int) -> int | str:
        """The client's name in the records."""

    @abstractmethod
    def elsewhere(self) -> dict[str, Any]:
        """What stands in config.toml for the sections data, model, client and engine."""

    def describe(self, rounds: int) -> Config:
        """The configuration of a run, as far as the server's side knows it."""
        server, theirs = self.server, self.elsewhere()
        return Config(
            rounds=rounds,
            seed=self.seed,
            checkpoint_every=1,
            sections={
                "data": theirs["data"],
                "model": theirs["model"],
                "client": theirs["client"],
                "sampler": self.sampler,
                "transform": NoTransform(),
                "filter": server.filter,
                "weighting": self.weighting,
                "estimator": server.estimator,
                "guard": server.guard or NoGuard(),
                "trust": server.trust or NoTrust(),
                "privacy": NoPrivacy(),
                "server": self.optimizer,
                "adapter": server.adapter,
                "average": server.average,
                "engine": theirs["engine"],
            },
        )

    def line(
        self,
        result: TrainingResult,
        metrics: Mapping[str, Mapping[str, Any] | None],
        seconds: dict[str, float],
    ) -> dict[str, Any]:
        """A line of rounds.jsonl: the simulator's fields, and what only a federation has."""
        loss, averaged_loss = self._tested(metrics, loss_of)
        accuracy, averaged_accuracy = self._tested(metrics, accuracy_of)
        line = Round(
            self.t,
            (),
            result.record,
            test_loss=loss,
            test_accuracy=accuracy,
            averaged_loss=averaged_loss,
            averaged_accuracy=averaged_accuracy,
            metrics=_others(metrics),
            score=self.score,
            alarm=result.alarm,
            seconds=seconds,
        ).to_dict()
        if averaged_loss is not None:
            line["averaged_loss"] = averaged_loss  # also where nobody reports an accuracy
        again = {entry["id"] for entry in result.record.clients}
        failed = [c for c in result.failed if c["id"] not in again]
        entries = [*failed, *result.record.clients]
        line["clients"] = [{**e, "id": self.name(e["id"])} for e in entries]
        line["attempts"] = 1 + len(result.retried)
        if result.retried:
            line["retried"] = result.retried
        known = {part: values for part, values in metrics.items() if values is not None}
        line["metrics"] = {part: plain(values, self.hidden) for part, values in known.items()}
        return line

    def _tested(
        self,
        metrics: Mapping[str, Mapping[str, Any] | None],
        read: Callable[[Mapping[str, object]], float | None],
    ) -> tuple[float | None, float | None]:
        """One number of the newest model and of the average, both by the same samples.

        Those of the server count first: the other's are the clients'.
        """
        for part in ("server", "evaluate"):
            found = (plain(metrics.get(name), self.hidden) for name in (part, AVERAGED + part))
            newest, averaged = map(read, found)
            if newest is not None or averaged is not None:
                return newest, averaged
        return None, None

    def conclude(self, records: Collection[Mapping[str, Any]], rounds: int) -> str | None:
        """Logs how the run went; the last reason, if no round could be trained."""
        skipped = [r for r in records if r["status"] == "skipped"]
        rejected = sum("rejected" in c for r in records for c in r["clients"])
        flagged = [r["round"] + 1 for r in records if r["alarm"]]
        self.info(
            "%d of %d rounds trained; %d updates were left out; alarms in rounds %s",
            len(records) - len(skipped),
            rounds,
            rejected,
            flagged or "none",
        )
        if not skipped:
            return None
        reason = skipped[-1]["reason"]
        self.warn("%d of %d rounds were skipped: %s", len(skipped), rounds, reason)
        return reason if len(skipped) == len(records) else None


def _others(metrics: Mapping[str, Mapping[str, Any] | None]) -> dict[str, float]:
    """All other numbers of both models, by their names in a record: test_f1, averaged_f1."""
    named: dict[str, float] = {}
    for part in ("evaluate", "server"):  # those of the server count, where both have one
        both = [numbers(metrics.get(which + part) or {}) for which in ("", AVERAGED)]
        for name in {**both[0], **both[1]}:
            for readout, known in zip(("test", "averaged"), both, strict=True):
                named.pop(f"{readout}_{name}", None)
                if name in known:
                    named[f"{readout}_{name}"] = known[name]
    return named
