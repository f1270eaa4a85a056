"""Monitor: see before you trust. GSI, alarms and records for any Flower strategy, unchanged."""

from collections.abc import Iterable
from contextlib import ExitStack
from os import PathLike
from time import perf_counter
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedglad.adapters import Adapter, Glad
from fedglad.core.guard import Guard
from fedglad.federation.folder import Write, opened, run_folder
from fedglad.federation.session import TrainingResult
from fedglad.flower import log
from fedglad.flower.nodes import Directory
from fedglad.flower.session import Session
from fedglad.flower.strategy import EvaluateFn, FedGLAD
from fedglad.flower.transport import matched
from fedglad.runs.folder import RunError
from fedglad.samplers.base import Cohort

OBSERVED = ("configure_train", "aggregate_train", "aggregate_evaluate")


class Monitor(Strategy):
    """Measures every round of a Flower strategy and leaves its model as it is.

    >>> from flwr.serverapp.strategy import FedAvg
    >>> strategy = Monitor(FedAvg(fraction_train=0.1))
    >>> strategy.fraction_train, strategy.records  # FedAvg's own setting; no round yet
    (0.1, [])

    `records` has one dict a round, in the fields of a run's rounds.jsonl: GSI, the alarm, what
    fedglad would have rejected, and the factors that the adapter would have used. With
    `checkpoint_dir` they are also written to a folder, for `compare` and `report`; "out/{run}" is a
    new one for every run. It stops nobody: a folder that is used or cannot be written is a warning,
    as is a model that cannot be measured. It costs two models of memory.

    It sends no message: clients are named as they were registered, else by node id.
    """

    def __init__(
        self,
        inner: Strategy,
        adapter: Adapter | None = Glad(),  # noqa: B008 - frozen
        *,
        guard: Guard | None = Guard(),  # noqa: B008 - frozen
        buffers: Iterable[str] | None = None,
        checkpoint_dir: str | PathLike[str] | None = None,
        weighted_by_key: str | None = None,
    ) -> None:
        if isinstance(inner, FedGLAD | Monitor):
            raise TypeError(f"{type(inner).__name__} keeps its own records: use it as it is")
        self.inner = inner
        self.adapter, self.guard = adapter, guard
        self.buffers = None if buffers is None else tuple(buffers)
        self.checkpoint_dir = checkpoint_dir
        self.weight_key = weighted_by_key or getattr(inner, "weighted_by_key", "num-examples")
        self.records: list[dict[str, Any]] = []
        self.session: Session | None = None
        self._asked: tuple[Cohort, list[Metadata], float] | None = None
        self._open: tuple[TrainingResult, float] | None = None  # a round not yet evaluated
        self._metrics: dict[str, MetricRecord | None] = {}
        self._inner: dict[str, Any] = {}
        self._write: Write | None = None

    def __getattr__(self, name: str) -> Any:
        if "inner" not in self.__dict__:  # while it is being copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def summary(self) -> None:
        """Logs the settings."""
        log.info("\t├── Monitored by fedglad: %s", self.adapter)
        self.inner.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """As the inner strategy's."""

        def tested(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(server_round, arrays) if evaluate_fn else None
            if server_round:
                self._record("server", metrics)
            return metrics

        configs = (train_config, evaluate_config, tested if evaluate_fn else None)
        args = (grid, initial_arrays, num_rounds, timeout, *configs)
        try:
            self.session = self._begin(initial_arrays)
        except Exception as error:
            log.warn("Monitor: this model cannot be measured: %r", error)
            return self.inner.start(*args)
        with ExitStack() as folder:
            self._open_folder(folder, self.session, num_rounds)
            result = self._observed(args)
            try:
                folder.close()
            except (RunError, OSError) as error:
                log.warn("Monitor: the end of the run could not be written: %s", error)
        return result

    def _open_folder(self, folder: ExitStack, session: Session, rounds: int) -> None:
        """Opens the run's folder; where it cannot be written, the run goes on without it."""
        try:
            path = run_folder(self.checkpoint_dir)
            opening = opened(path, session, rounds, resumable=False)
            self.records, self._write = folder.enter_context(opening)
        except (RunError, OSError, ValueError) as error:
            log.warn("Monitor: nothing is written: %s", error)
            self.records, self._write = [], None

    def _observed(self, args: tuple[Any, ...]) -> Result:
        """The inner strategy's run, in which our methods stand in the place of three of its own."""
        attributes = vars(self.inner)
        before = {name: attributes[name] for name in OBSERVED if name in attributes}
        self._inner = {name: getattr(self.inner, name) for name in OBSERVED}
        attributes.update({name: getattr(self, name) for name in OBSERVED})
        try:
            return self.inner.start(*args)
        finally:
            for name in OBSERVED:
                del attributes[name]
            attributes.update(before)
            self._close_round()
            self._write = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's messages."""
        self._close_round()
        messages = list(self._of_inner("configure_train")(server_round, arrays, config, grid))
        try:
            self._expect(server_round, arrays, grid, messages)
        except Exception as error:
            log.warn("Monitor: round %d cannot be measured: %r", server_round, error)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The inner strategy's model; the replies are measured on the way."""
        replies = list(replies)
        try:
            self._measure(replies)
        except Exception as error:
            log.warn("Monitor: round %d cannot be measured: %r", server_round, error)
        arrays, metrics = self._of_inner("aggregate_train")(server_round, replies)
        self._record("train", metrics)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's messages."""
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The inner strategy's metrics."""
        metrics = self._of_inner("aggregate_evaluate")(server_round, replies)
        self._record("evaluate", metrics)
        return metrics

    def _expect(
        self, server_round: int, arrays: ArrayRecord, grid: Grid, messages: list[Message]
    ) -> None:
        """Keeps which clients are asked, and with which model."""
        self._asked = None
        session = self.session = self.session or self._begin(arrays)
        session.take_over(arrays)
        session.t = server_round - 1
        if session.directory.kind == "auto":
            all_named = all(info.name for info in grid.get_nodes())
            session.directory = Directory("name" if all_named else "id")
        session.directory.refresh(grid, 0.0)
        clients = {node: client for client, node in session.directory.online.items()}
        asked = [m for m in messages if m.metadata.dst_node_id in clients]
        ids = tuple(clients[m.metadata.dst_node_id] for m in asked)
        self._asked = Cohort(ids), [message.metadata for message in asked], perf_counter()

    def _measure(self, replies: list[Message]) -> None:
        """One step of fedglad's server, of which only the record is kept."""
        if self._asked is None or self.session is None:
            return
        (cohort, sent, begun), self._asked = self._asked, None
        missing = ["no reply in time"] * len(sent)
        result = self.session.aggregate(cohort, matched(sent, replies, missing))
        self._open = result, perf_counter() - begun
        self.records.append({})
        self._record("train", None)
        if result.alarm:
            log.warn("Round %d: %s", self.session.t + 1, result.alarm)

    def _record(self, part: str, metrics: MetricRecord | None) -> None:
        """Writes what is known by now into the round's record."""
        if self._open is not None and self.session is not None:
            result, seconds = self._open
            self._metrics[part] = metrics
            self.records[-1] = self.session.line(result, self._metrics, {"train": seconds})

    def _close_round(self) -> None:
        """Writes the round that was open to the folder, now that it was also evaluated."""
        try:
            if self._open is not None and self._write is not None:
                self._write(self.records[-1])
        except Exception as error:
            log.warn("Monitor: the round could not be written: %r", error)
        self._open, self._metrics = None, {}

    def _of_inner(self, name: str) -> Any:
        """The inner strategy's method, whose place ours takes while it runs."""
        return self._inner.get(name) or getattr(self.inner, name)

    def _begin(self, arrays: ArrayRecord) -> Session:
        return Session(
            arrays,
            weight_key=self.weight_key,
            adapter=self.adapter,
            buffers=self.buffers,
            guard=self.guard,
        )
