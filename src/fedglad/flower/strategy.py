"""FedGLAD for Flower's Message API: our Server behind Flower's Strategy."""

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedglad.adapters import Adapter, Glad
from fedglad.averages import Average, NoAverage
from fedglad.core import malloc
from fedglad.core.guard import Guard
from fedglad.estimators import Estimator
from fedglad.federation.folder import opened
from fedglad.federation.session import AVERAGED, TrainingResult
from fedglad.filters import Filter
from fedglad.flower import log
from fedglad.flower.nodes import Directory, Kind
from fedglad.flower.replies import mean_metrics, rounds_of
from fedglad.flower.session import Session
from fedglad.flower.settings import Share
from fedglad.flower.transport import exchange, in_order
from fedglad.optimizers import SGD, Optimizer
from fedglad.records import Record
from fedglad.samplers.base import Cohort, Sampler
from fedglad.server.compatibility import refuse
from fedglad.weights import Samples

AggrFn = Callable[[list[RecordDict], str], MetricRecord]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
Evaluated = Literal["model", "averaged", "both"]


class NothingTrained(RuntimeError):
    """A run in which no round could be stepped: its model is the one it began with."""


class FedGLAD(Strategy):
    """Any of fedglad's server optimizers, adapters, weightings, filters and samplers on Flower.

    >>> from fedglad.optimizers import Adam
    >>> strategy = FedGLAD(optimizer=Adam(lr=5e-3), fraction_train=0.1)
    >>> strategy.adapter, strategy.records  # which fill while strategy.start(grid, arrays) runs
    (Glad(groups='tensor', min_group=1, gamma=0.02, beta=0.9), [])

    The positional arguments are those of Flower's FedAvg and mean the same. Clients stay as they
    are: they reply with their full weights and `num-examples`.

    | argument | meaning |
    |---|---|
    | `optimizer`, `adapter`, `filter`, `weighting`, `buffers`, `guard` | as of `fedglad.Server` |
    | `estimator` | as of `fedglad.Server`: of the mean of all clients, by what they sent before |
    | `average` | of the server's models, as of `fedglad.Server`; to be read as `averaged` |
    | `evaluate` | what clients test: "model", the newest one, "averaged", or "both" |
    | `min_clients` | with fewer good replies a round is tried again, then skipped |
    | `sampler` | who takes part; its own `clients_per_round` takes the place of fraction_train |
    | `seed` | of the cohorts, for a sampler with `seed="run"`, and of who evaluates |
    | `nodes` | how nodes are told apart: auto, name, key, partition-id, id |
    | `round_timeout` | seconds that a round's replies are waited for; None: `start`'s timeout |
    | `retries` | other cohorts that are asked when too few replies were good |
    | `checkpoint_dir` | the run's folder; starting again with it goes on from the last round |
    | `report` | "norms": clients report their norms (`report_norms`), only sums are looked at |

    `records` has one dict a round, in the fields of a run's rounds.jsonl.

    An average costs a model of memory here, and clients nothing: they train on the newest model,
    which is also the result's. With `evaluate="averaged"` they test the average in its place, at
    the same cost; with "both", one after the other, at twice that. Where the server tests, by
    `start`'s `evaluate_fn`, that function is called for both, unless the average says
    `EMA(test=False)`. Records have `test_…` of the newest model and `averaged_…` of the average;
    the fields of Flower's result are all of the newest.
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggrFn | None = None,
        evaluate_metrics_aggr_fn: AggrFn | None = None,
        *,
        optimizer: Optimizer | None = None,
        adapter: Adapter | None = Glad(),  # noqa: B008 - frozen
        filter: Filter | None = None,
        weighting: Samples | None = None,
        estimator: Estimator | None = None,
        average: Average | None = None,
        evaluate: Evaluated = "model",
        buffers: Iterable[str] | None = None,
        guard: Guard | None = Guard(),  # noqa: B008 - frozen
        min_clients: int = 1,
        sampler: Sampler | None = None,
        seed: int = 0,
        nodes: Kind = "auto",
        round_timeout: float | None = None,
        retries: int = 2,
        checkpoint_dir: str | PathLike[str] | None = None,
        report: Literal["updates", "norms"] = "updates",
    ) -> None:
        for name, value in {"train": fraction_train, "evaluate": fraction_evaluate}.items():
            if not 0 <= value <= 1:
                raise ValueError(f"fraction_{name}={value!r}: must be a share in [0, 1]")
        if sampler is not None and fraction_train not in (0.0, 1.0):
            raise ValueError(
                f"fraction_train={fraction_train!r} and a sampler: its clients_per_round says how "
                "many take part; give one of the two"
            )
        if round_timeout is not None and not 0 < round_timeout < math.inf:
            raise ValueError(f"round_timeout={round_timeout!r}: must be positive, in seconds")
        if min_clients < 1:
            raise ValueError(f"min_clients={min_clients!r}: a round needs at least one client")
        refuse(
            adapter or Adapter(),
            filter or Filter(),
            weighting or Samples(),
            sampler=sampler,
            server=optimizer,
            estimator=estimator,
            average=average,
        )
        if sampler is not None and min_clients > sampler.clients_per_round:
            raise ValueError(
                f"min_clients={min_clients} is more than the sampler's clients_per_round="
                f"{sampler.clients_per_round}: no round could be trained"
            )
        if arrayrecord_key == configrecord_key:
            raise ValueError(f"arrayrecord_key and configrecord_key are both {arrayrecord_key!r}")
        if retries < 0:
            raise ValueError(f"retries={retries!r}: must be 0 or more")
        if report not in ("updates", "norms"):
            raise ValueError(f"report={report!r}: choose updates or norms")
        if evaluate not in get_args(Evaluated):
            raise ValueError(f"evaluate={evaluate!r}: choose {', '.join(get_args(Evaluated))}")
        average = None if isinstance(average, NoAverage) else average
        if evaluate != "model" and average is None:
            raise ValueError(f"evaluate={evaluate!r} needs an average: give one, average=EMA()")
        self.fraction_train, self.fraction_evaluate = fraction_train, fraction_evaluate
        self.min_train_nodes = min_train_nodes if fraction_train else 0
        self.min_evaluate_nodes = min_evaluate_nodes if fraction_evaluate else 0
        self.min_available_nodes = min_available_nodes
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or mean_metrics
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or mean_metrics
        for name in ("train", "evaluate"):
            if not getattr(self, f"fraction_{name}"):
                log.warn("fraction_%s is 0: no node will %s", name, name)
        self.optimizer = optimizer or SGD()
        self.adapter, self.filter, self.weighting = adapter, filter, weighting
        self.estimator, self.average = estimator, average
        self.evaluate: Evaluated = evaluate
        self.buffers = None if buffers is None else tuple(buffers)
        self.guard, self.min_clients = guard, min_clients
        least = max(self.min_train_nodes, 1)
        self.sampler = sampler or Share(
            clients_per_round=least, fraction=fraction_train, seed="run"
        )
        self.seed = seed
        self.nodes: Kind = nodes
        self.round_timeout, self.retries = round_timeout, retries
        self.checkpoint_dir, self.report = checkpoint_dir, report
        Directory(nodes)  # raises for a kind there is not
        self.records: list[dict[str, Any]] = []
        self.session: Session | None = None
        self._asked: dict[str, tuple[Cohort, list[Message]]] = {}  # between Flower's two halves
        self._given: ArrayRecord | None = None
        self._waited = round_timeout or 3600.0  # seconds, unless `start` is given others

    @property
    def averaged(self) -> ArrayRecord:
        """The average of the models so far: names, order and dtypes of the initial arrays.

        Raises ValueError before the run, without an average, and where a strategy around this one
        has changed the models.
        """
        if self.session is None:
            raise ValueError("there is no average yet: it is there once `start` was called")
        return self.session.averaged()

    def summary(self) -> None:
        """Logs the settings."""
        log.info("\t├── Optimizer: %s", self.optimizer)
        log.info("\t├── Adapter: %s", self.adapter)
        log.info("\t├── Filter: %s | weighting: %s", self.filter, self.weighting)
        log.info("\t├── Estimator: %s | average: %s", self.estimator, self.average)
        log.info("\t├── Sampler: %s", self.sampler)
        log.info("\t└── Run folder: %s", self.checkpoint_dir)

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
        """Runs the rounds that are left, and returns the result of all."""
        timeout = math.inf if timeout is None else timeout  # pyright: ignore  - as Flower's
        log.info("Starting %s strategy, %d rounds:", type(self).__name__, num_rounds)
        self.summary()
        malloc.give_back()  # glibc keeps 5 MB for each of Flower's threads: a sixth of the peak
        session = self.session = self._begin(initial_arrays, num_rounds)
        self._waited = self.round_timeout or timeout
        folder = opened(self.checkpoint_dir, session, num_rounds)
        with closing(session), folder as (self.records, write):
            initial = evaluate_fn(0, session.arrays()) if evaluate_fn and not session.t else None
            for t in range(session.t, num_rounds):
                log.info("[ROUND %d/%d]", t + 1, num_rounds)
                begin = perf_counter()
                if self.fraction_train:
                    config = train_config or ConfigRecord()
                    trained = session.train(grid, config, self._waited, self.retries)
                else:
                    session.wait(grid, self._waited)
                    trained = TrainingResult(Record("skipped", "fraction_train is 0"))
                metrics = {"initial": initial} if t == 0 else {}
                metrics["train"] = self._metrics(trained.contents, "train")
                middle = perf_counter()
                if self.fraction_evaluate:
                    config = evaluate_config or ConfigRecord()
                    metrics |= self._tested_by_clients(session, grid, config)
                if evaluate_fn:
                    # The newest last: what the function leaves behind of a round is of that.
                    if self.average is not None and self.average.test:
                        metrics[f"{AVERAGED}server"] = evaluate_fn(t + 1, session.averaged())
                    metrics["server"] = evaluate_fn(t + 1, session.arrays())
                seconds = {"train": middle - begin, "test": perf_counter() - middle}
                self._record(session, trained, metrics, seconds)
                write(self.records[-1])
            self._conclude(session, num_rounds)
        result = Result()
        result.arrays = session.arrays()
        if initial is not None:
            result.evaluate_metrics_serverapp[0] = initial
        result.train_metrics_clientapp.update(rounds_of(self.records, "train"))
        result.evaluate_metrics_clientapp.update(rounds_of(self.records, "evaluate"))
        result.evaluate_metrics_serverapp.update(rounds_of(self.records, "initial", first=0))
        result.evaluate_metrics_serverapp.update(rounds_of(self.records, "server"))
        return result

    def _tested_by_clients(
        self, session: Session, grid: Grid, config: ConfigRecord
    ) -> dict[str, MetricRecord | None]:
        """The clients' metrics of the newest model, of the average, or of both."""
        metrics: dict[str, MetricRecord | None] = {}
        names = {"model": ("",), "averaged": (AVERAGED,), "both": ("", AVERAGED)}
        for name in names[self.evaluate]:
            arrays = session.averaged() if name else session.arrays()
            asked = self.configure_evaluate(session.t + 1, arrays, config, grid)
            replies = exchange(grid, list(asked), self._waited)
            metrics[f"{name}evaluate"] = self.aggregate_evaluate(session.t + 1, replies)
        return metrics

    # What Flower's own `Strategy.start`, and strategies that wrap others, call.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages to a round's cohort."""
        self._asked.clear()
        if not self.fraction_train:
            return []
        session = self._session(arrays, server_round)
        if reason := session.wait(grid, self._waited):
            log.warn("Round %d: %s", server_round, reason)
            return []
        cohort = session.choose(grid, self._waited)
        messages = session.messages(cohort.ids, arrays, config, MessageType.TRAIN)
        self._asked["train"] = cohort, messages
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The model after the replies, None if they made no round."""
        asked, session = self._asked.pop("train", None), self.session
        if asked is None or session is None:
            return None, None
        cohort, messages = asked
        trained = session.aggregate(cohort, in_order(messages, replies), self._waited)
        metrics = self._metrics(trained.contents, "train")
        self._record(session, trained, {"train": metrics}, {})
        self._given = session.arrays() if trained.record.stepped else None
        return self._given, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages to those who test the model."""
        if not self.fraction_evaluate:
            return []
        session = self._session(arrays, server_round, take_over=False)
        fraction, least = self.fraction_evaluate, self.min_evaluate_nodes
        clients = session.evaluators(grid, fraction, least, self._waited)
        messages = session.messages(clients, arrays, config, MessageType.EVALUATE)
        self._asked["evaluate"] = Cohort(tuple(clients)), messages
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message | None]
    ) -> MetricRecord | None:
        """The mean metrics of the usable replies."""
        asked = self._asked.pop("evaluate", None)
        if asked is None or self.session is None:
            return None
        cohort, messages = asked
        contents = self.session.evaluations(cohort.ids, in_order(messages, replies), self._waited)
        return self._metrics(contents, "evaluate")

    def _begin(self, arrays: ArrayRecord, rounds: int | None = None) -> Session:
        """A new session; only where the number of rounds is known does it use a folder."""
        folder = None if rounds is None else self.checkpoint_dir
        return Session(
            arrays,
            sampler=self.sampler,
            optimizer=self.optimizer,
            weighting=self.weighting,
            rounds=rounds,
            seed=self.seed,
            nodes=self.nodes,
            weight_key=self.weighted_by_key,
            arrays_key=self.arrayrecord_key,
            config_key=self.configrecord_key,
            min_nodes=self.min_available_nodes,
            report=self.report,
            memories=Path(folder) / "memories" if folder else None,
            adapter=self.adapter,
            filter=self.filter,
            average=self.average,
            buffers=self.buffers,
            guard=self.guard,
            min_clients=self.min_clients,
            estimator=self.estimator,
        )

    def _session(
        self, arrays: ArrayRecord, server_round: int, *, take_over: bool = True
    ) -> Session:
        """The session of Flower's loop, in which others may have changed the model."""
        if self.session is None or (take_over and server_round == 1):
            if self.checkpoint_dir is not None:
                log.warn(
                    "checkpoint_dir is not used: only FedGLAD.start writes and goes on from it"
                )
            if self.evaluate != "model":
                log.warn(
                    "evaluate=%r is not used: outside of FedGLAD.start, clients test the model "
                    "that they are given",
                    self.evaluate,
                )
            self.session, self.records = self._begin(arrays), []
        elif take_over and arrays is not self._given:
            self.session.take_over(arrays)
        self.session.t = server_round - 1
        return self.session

    def _metrics(self, contents: list[RecordDict], what: str) -> MetricRecord | None:
        """The metrics by the user's function; if it fails, training goes on without them."""
        name = f"{what}_metrics_aggr_fn"
        try:
            return getattr(self, name)(contents, self.weighted_by_key) if contents else None
        except Exception as error:
            log.warn("%s failed, the round has no such metrics: %r", name, error)
            return None

    def _record(
        self,
        session: Session,
        trained: TrainingResult,
        metrics: dict[str, MetricRecord | None],
        seconds: dict[str, float],
    ) -> None:
        """Adds the round to the records and moves on."""
        self.records.append(session.line(trained, metrics, seconds))
        session.t += 1
        record, line = trained.record, self.records[-1]
        parts = [record.status if record.gsi_all is None else f"GSI {record.gsi_all:.3f}"]
        for name, key in {"accuracy": "test_accuracy", "averaged": "averaged_accuracy"}.items():
            if (accuracy := line.get(key)) is not None:
                parts.append(f"{name} {100 * accuracy:.2f} %")
        parts += [text for text in (record.reason, trained.alarm) if text]
        log.info("\t└──> %s", ", ".join(parts))

    def _conclude(self, session: Session, rounds: int) -> None:
        """Logs how the run went; raises if no round was trained."""
        reason = session.conclude(self.records, rounds)
        if self.fraction_train and rounds and reason is not None:
            raise NothingTrained(
                f"none of {len(self.records)} rounds could be trained, the model is the initial "
                f"one; the last round: {reason}. To try again, raise num_rounds or choose another "
                "checkpoint_dir"
            )
