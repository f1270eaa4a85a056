"""FedGLAD for Flower's Message API: our Server behind Flower's Strategy."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, cast, get_args

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedglad.adapters import Adapter, Glad
from fedglad.analysis.per_client import clients, worst
from fedglad.averages import Average, NoAverage
from fedglad.core import malloc
from fedglad.core.guard import Guard
from fedglad.estimators import Estimator
from fedglad.federation.folder import opened, run_folder
from fedglad.federation.session import AVERAGED, TrainingResult
from fedglad.federation.telling import Tell
from fedglad.filters import Filter
from fedglad.flower import log, versions
from fedglad.flower.app import fingerprints, shadowed
from fedglad.flower.masked import MaskedRound, session_name
from fedglad.flower.nodes import Directory, Kind
from fedglad.flower.replies import mean_metrics, rounds_of, why_not
from fedglad.flower.session import Session, TooFewNodes
from fedglad.flower.settings import Share
from fedglad.flower.transport import Found, Replies, clock, is_simulated, matched, pause
from fedglad.optimizers import SGD, Optimizer
from fedglad.records import ACCURACY, Record
from fedglad.runs.checkpoints import Keep
from fedglad.runs.folder import RunError
from fedglad.samplers.base import Cohort, Sampler
from fedglad.secure import SecureSum
from fedglad.server.compatibility import refuse
from fedglad.tasks.base import Task, as_task, score_of
from fedglad.trust import Trust
from fedglad.weights import Samples

AggrFn = Callable[[list[RecordDict], str], MetricRecord]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
Evaluated = Literal["model", "averaged", "both"]
Short = Literal["wait", "skip", "fail"]
PAUSES = (5.0, 60.0)  # seconds before a round whose nodes are gone is tried again: first, and most


class NothingTrained(RuntimeError):
    """A run in which no round could be stepped: its model is the one it began with."""


class TooManySkipped(RuntimeError):
    """A run in which more rounds were skipped than `max_skipped` allows."""


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
    | `trust` | how much each client's updates are like the others', as of `fedglad.Server` |
    | `task` | says which of the metrics is the score, and whether more is better; else accuracy |
    | `estimator` | as of `fedglad.Server`: of the mean of all clients, by what they sent before |
    | `average` | of the server's models, as of `fedglad.Server`; to be read as `averaged` |
    | `evaluate` | what clients test: "model", the newest one, "averaged", or "both" |
    | `min_clients` | with fewer good replies a round is tried again, then skipped |
    | `sampler` | who takes part; its own `clients_per_round` takes the place of fraction_train |
    | `seed` | of the cohorts, for a sampler with `seed="run"`, and of who evaluates |
    | `nodes` | how nodes are told apart: auto, name, key, partition-id, id |
    | `round_timeout` | seconds that a round's replies are waited for; None: `start`'s timeout |
    | `quorum`, `grace` | once that share of the replies is there, the others have `grace` seconds |
    | `retries` | other cohorts that are asked when too few replies were good |
    | `quarantine` | after so many rounds in a row without an answer a node rests; 0: never |
    | `on_short` | with too few nodes in a round: "wait" for them, "skip" the round, or "fail" |
    | `node_timeout` | seconds that nodes are waited for, at the beginning and by "wait" |
    | `max_skipped` | the share of all rounds that may be skipped; with more the run fails |
    | `checkpoint_dir` | the run's folder; "out/{run}" is a new one for every run: out/1, out/2 … |
    | `resume` | go on with the run in that folder, by "{run}" with the last one; else it is new |
    | `migrate` | going on, the initial arrays may be of a changed model: what fits is kept |
    | `keep` | which checkpoints stay, `Keep(last=2, every=0, best=False)` |
    | `tell` | who hears of each round: functions, a log of JSON, Prometheus; see `Tell` |
    | `report` | "norms": clients report their norms (`report_norms`), only sums are looked at; |
    |          | "secure", or a `SecureSum`: updates are masked (`secure_sum`), and only their |
    |          | sums can be seen |

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
        trust: Trust | None = Trust(),  # noqa: B008 - frozen
        task: Task | None = None,
        min_clients: int = 1,
        sampler: Sampler | None = None,
        seed: int = 0,
        nodes: Kind = "auto",
        round_timeout: float | None = None,
        quorum: float = 1.0,
        grace: float = 0.0,
        retries: int = 2,
        quarantine: int = 3,
        on_short: Short = "wait",
        node_timeout: float = 3600.0,
        max_skipped: float = 0.5,
        checkpoint_dir: str | PathLike[str] | None = None,
        resume: bool = False,
        migrate: bool = False,
        keep: Keep = Keep(),  # noqa: B008 - frozen
        tell: Tell = Tell(),  # noqa: B008 - frozen
        report: Literal["updates", "norms", "secure"] | SecureSum = "updates",
    ) -> None:
        shares = {"fraction_train": fraction_train, "fraction_evaluate": fraction_evaluate}
        for name, value in {**shares, "max_skipped": max_skipped}.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r}: must be a share in [0, 1]")
        if not 0 < quorum <= 1:
            raise ValueError(f"quorum={quorum!r}: must be a share of the replies, in (0, 1]")
        for name, value in {"grace": grace, "quarantine": quarantine}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r}: must be 0 or more")
        if not node_timeout > 0:
            raise ValueError(f"node_timeout={node_timeout!r}: must be positive, in seconds")
        if on_short not in get_args(Short):
            raise ValueError(f"on_short={on_short!r}: choose {', '.join(get_args(Short))}")
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
        self.secure = report if isinstance(report, SecureSum) else None
        if report == "secure":
            self.secure = SecureSum()
        report = "secure" if isinstance(report, SecureSum) else report
        if report not in ("updates", "norms", "secure"):
            raise ValueError(f"report={report!r}: choose updates, norms or secure")
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
        if not fraction_train:
            log.warn("fraction_train is 0: no node will train")
        self.optimizer = optimizer or SGD()
        self.adapter, self.filter, self.weighting = adapter, filter, weighting
        self.estimator, self.average = estimator, average
        self.evaluate: Evaluated = evaluate
        self.buffers = None if buffers is None else tuple(buffers)
        self.guard, self.min_clients, self.trust, self.task = guard, min_clients, trust, task
        least = max(self.min_train_nodes, 1)
        self.sampler = sampler or Share(
            clients_per_round=least, fraction=fraction_train, seed="run"
        )
        self.seed = seed
        self.nodes: Kind = nodes
        self.round_timeout, self.retries = round_timeout, retries
        self.quorum, self.grace, self.quarantine = quorum, grace, quarantine
        self.on_short: Short = on_short
        self.node_timeout, self.max_skipped = node_timeout, max_skipped
        self.checkpoint_dir, self.resume, self.report = checkpoint_dir, resume, report
        self.migrate, self.keep, self.tell = migrate, keep, tell
        self.folder: Path | None = None  # that of the run, once `start` was called
        Directory(nodes)  # raises for a kind there is not
        self.records: list[dict[str, Any]] = []
        self.session: Session | None = None
        # Between Flower's two halves: whom, by which messages, and what became of the round.
        self._asked: dict[str, tuple[Cohort, Sequence[Metadata]]] = {}
        self._given: ArrayRecord | None = None
        self._next: ArrayRecord | None = None  # the model of the next round, if it is made already
        self._replies: Replies | None = None  # in our own loop
        self._attempt: tuple[int, tuple[int, ...]] | None = None  # its number, who failed before
        self._short = ""
        self._result: TrainingResult | None = None
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
        log.info(
            "\t├── Evaluation: %g of the nodes, at least %d",
            self.fraction_evaluate,
            self.min_evaluate_nodes,
        )
        log.info(
            "\t├── Keys: weight %r, arrays %r, config %r",
            self.weighted_by_key,
            self.arrayrecord_key,
            self.configrecord_key,
        )
        log.info("\t└── Run folder: %s", self.folder or self.checkpoint_dir)

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
        versions.told()
        malloc.give_back()  # glibc keeps 5 MB for each of Flower's threads: a sixth of the peak
        if other := shadowed(grid):
            raise RunError(
                f"Flower's workers would import {other} in place of the app that was sent, as its "
                "local SuperLink was started in that folder: end it (the process flower-superlink "
                "--insecure --simulation) and start again"
            )
        self.folder = run_folder(self.checkpoint_dir, resume=self.resume)
        session = self.session = self._begin(initial_arrays, num_rounds)
        self._waited = self.round_timeout or timeout
        train_config = train_config or ConfigRecord()
        evaluate_config = evaluate_config or ConfigRecord()
        result, begin, initial = Result(), perf_counter(), None
        folder = opened(
            self.folder,
            session,
            num_rounds,
            resume=self.resume,
            app=fingerprints(grid),
            keep=self.keep,
            migrate=self.migrate,
            tell=self.tell,
        )
        with closing(session), folder as (self.records, write):
            log.info("Starting %s strategy:", type(self).__name__)
            _log_start(num_rounds, initial_arrays, train_config, evaluate_config)
            self.summary()
            log.info("Ctrl-C ends this log, not the run: flwr stop %d", grid.run.run_id)
            self._next = None
            if evaluate_fn and not session.t:
                initial = evaluate_fn(0, session.arrays())
                log.info("Initial global evaluation results: %s", initial)
            try:
                for t in range(session.t, num_rounds):
                    log.info("")
                    log.info("[ROUND %d/%d]", t + 1, num_rounds)
                    metrics = {"initial": initial} if t == 0 else {}
                    configs = train_config, evaluate_config
                    self._round(session, grid, configs, evaluate_fn, metrics)
                    write(self.records[-1])
                    self._check_skipped(num_rounds)
                self._conclude(session, num_rounds)
            except (TooFewNodes, TooManySkipped, NothingTrained) as error:
                log.warn("The run has failed: %s", error)
                raise
            finally:
                self._attempt = self._next = None
            result.arrays = session.arrays()
            if initial is not None:
                result.evaluate_metrics_serverapp[0] = initial
            result.train_metrics_clientapp.update(rounds_of(self.records, "train"))
            result.evaluate_metrics_clientapp.update(rounds_of(self.records, "evaluate"))
            tested = result.evaluate_metrics_serverapp
            tested.update(rounds_of(self.records, "initial", first=0))
            tested.update(rounds_of(self.records, "server"))
            log.info("Strategy execution finished in %.2fs", perf_counter() - begin)
            log.info("Final results:")
            for line in str(result).splitlines():
                log.info("\t%s", line)
        return result

    def _round(
        self,
        session: Session,
        grid: Grid,
        configs: tuple[ConfigRecord, ConfigRecord],
        evaluate_fn: EvaluateFn | None,
        metrics: dict[str, MetricRecord | None],
    ) -> None:
        """One round: training, and the tests of what came of it."""
        t, begin = session.t, perf_counter()
        trained, metrics["train"] = self._train(session, grid, configs[0])
        _log_metrics(metrics["train"])
        middle = perf_counter()
        metrics |= self._tested_by_clients(session, grid, configs[1])
        if evaluate_fn:
            # The newest last: what the function leaves behind of a round is of that.
            if self.average is not None and self.average.test:
                metrics[f"{AVERAGED}server"] = evaluate_fn(t + 1, session.averaged())
            metrics["server"] = evaluate_fn(t + 1, session.arrays())
            log.info("Global evaluation")
            log.info("\t└──> MetricRecord: %s", metrics["server"])
        seconds = {"train": middle - begin, "test": perf_counter() - middle}
        self._record(session, trained, metrics, seconds)

    def _train(
        self, session: Session, grid: Grid, config: ConfigRecord
    ) -> tuple[TrainingResult, MetricRecord | None]:
        """One round's training; of another cohort, if too few replies were good."""
        if not self.fraction_train:
            session.wait(grid, self._waited)
        retried: list[str] = []
        failed: dict[int, dict[str, Any]] = {}
        nap, deadline = PAUSES[0], clock() + self.node_timeout
        while True:
            self._attempt = len(retried), tuple(failed)
            trained, metrics = self._attempted(session, grid, config)
            if trained.record.stepped or not self.fraction_train:
                break
            lacking = bool(self._short) or len(session.gone) > len(trained.record.clients) // 2
            if lacking and self.on_short == "wait" and not is_simulated(grid):
                if clock() >= deadline:
                    raise TooFewNodes(f"{trained.record.reason}; {self._way_on()}")
                log.warn("Round %d waits for nodes: %s", session.t + 1, trained.record.reason)
                pause(min(nap, max(deadline - clock(), 0.0)))
                nap = min(2 * nap, PAUSES[1])
                continue
            nobody = not trained.record.clients  # as a subclass would have it, or nobody is there
            if nobody or len(retried) >= self.retries:
                break
            log.warn("Round %d is tried again: %s", session.t + 1, trained.record.reason)
            retried.append(trained.record.reason or "")
            failed |= {c["id"]: c for c in trained.record.clients if "rejected" in c}
        if not trained.record.stepped and self.fraction_train and self.on_short == "fail":
            raise TooFewNodes(f"round {session.t + 1}: {trained.record.reason}; {self._way_on()}")
        trained.retried, trained.failed = retried, list(failed.values())
        return trained, metrics

    def _attempted(
        self, session: Session, grid: Grid, config: ConfigRecord
    ) -> tuple[TrainingResult, MetricRecord | None]:
        """Flower's two halves of a round, which a subclass may have changed."""
        number = session.t + 1
        arrays = self._next or session.arrays()
        self._given, self._next = arrays, None
        self._result, self._short = None, ""
        replies = self._send(grid, list(self.configure_train(number, arrays, config, grid)))
        del arrays
        self._given = None  # and with it the arrays, while replies come in
        self._expect("train", session, grid, replies)
        self._replies = replies
        arrays, metrics = self.aggregate_train(number, replies)
        self._replies = None
        trained = cast(TrainingResult | None, self._result)
        if trained is None:
            log.info("\t└──> %s.aggregate_train made the model", type(self).__name__)
            status, reason = ("stepped", None) if arrays is not None else ("skipped", "no model")
            if not replies.metadata:
                status = "skipped"
                reason = self._short or "configure_train asked nobody"
            trained = TrainingResult(Record(status, reason))
        if arrays is not None and arrays is cast(ArrayRecord | None, self._given):
            self._next = arrays
        elif arrays is not None:
            session.take_over(arrays)
        return trained, metrics

    def _send(self, grid: Grid, messages: list[Message]) -> Replies:
        return Replies(grid, messages, self._waited, self.quorum, self.grace)

    def _expect(self, what: str, session: Session, grid: Grid, replies: Replies) -> None:
        """Whom the messages went to: those drawn, unless a subclass has chosen others."""
        nodes = [metadata.dst_node_id for metadata in replies.metadata]
        drawn = self._asked.pop(what, (None, ()))[0]
        if drawn is None or nodes != [session.directory.online.get(k) for k in drawn.ids]:
            drawn = session.cohort_of(grid, nodes, drawn) if nodes else None
        if drawn is not None:
            self._asked[what] = drawn, replies.metadata

    def _way_on(self) -> str:
        return "resume=True goes on from here" if self.folder else "no folder has its rounds"

    def _check_skipped(self, rounds: int) -> None:
        """Ends a run of which too many rounds were skipped."""
        skipped = [record for record in self.records if record["status"] == "skipped"]
        now = bool(self.fraction_train) and self.records[-1]["status"] == "skipped"
        most = self.max_skipped * rounds
        if now and len(self.records) > len(skipped) > most:
            raise TooManySkipped(
                f"{len(skipped)} of {rounds} rounds were skipped, more than max_skipped="
                f"{self.max_skipped:g} of them; the last: {skipped[-1]['reason']}; "
                f"{self._way_on()}"
            )

    def _tested_by_clients(
        self, session: Session, grid: Grid, config: ConfigRecord
    ) -> dict[str, MetricRecord | None]:
        """The clients' metrics of the newest model, of the average, or of both."""
        metrics: dict[str, MetricRecord | None] = {}
        changed = self._is_own("configure_evaluate") or self._is_own("aggregate_evaluate")
        if not self.fraction_evaluate and not changed:
            return metrics
        number = session.t + 1
        names = {"model": ("",), "averaged": (AVERAGED,), "both": ("", AVERAGED)}
        for name in names[self.evaluate]:
            arrays = session.averaged() if name else session.arrays()
            self._given = arrays
            replies = self._send(grid, list(self.configure_evaluate(number, arrays, config, grid)))
            del arrays
            self._given = None
            self._expect("evaluate", session, grid, replies)
            self._replies = replies
            metrics[f"{name}evaluate"] = self.aggregate_evaluate(number, replies)
            self._replies = None
            _log_metrics(metrics[f"{name}evaluate"])
        return metrics

    def _is_own(self, name: str) -> bool:
        """Whether a subclass, or somebody else, has put something in a method's place."""
        return name in vars(self) or getattr(type(self), name) is not getattr(FedGLAD, name)

    # What our own loop calls, as Flower's `Strategy.start` does, and strategies that wrap others.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages to a round's cohort."""
        self._asked.pop("train", None)
        if not self.fraction_train:
            self._short = "fraction_train is 0"
            return []
        session = self._session(arrays, server_round)
        longest = self.node_timeout if self.on_short == "wait" else self._waited
        if reason := session.wait(grid, longest):
            log.warn("Round %d: %s", server_round, reason)
            self._short = reason
            return []
        attempt, avoid = self._attempt or (0, ())
        cohort = session.choose(grid, self._waited, attempt, avoid)
        online = len(session.directory.online)
        log.info("configure_train: asked %d of %d nodes", len(cohort.ids), online)
        if self.secure is None:
            messages = session.messages(cohort.ids, arrays, config, MessageType.TRAIN)
        else:
            session.masked = MaskedRound(session, cohort, self.secure, partial(self._send, grid))
            cohort, messages = session.masked.open(arrays, config, session_name(grid, session.t))
        self._asked["train"] = cohort, [message.metadata for message in messages]
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The model after the replies, None if they made no round."""
        asked, session = self._asked.pop("train", None), self.session
        if session is None:
            return None, None
        if asked is None:
            if self._replies is not None:
                self._result = TrainingResult(Record("skipped", self._short or "nobody was asked"))
            return None, None
        trained = self._result = session.aggregate(asked[0], self._each(asked[1], replies))
        self._log_counts("train", asked[0], trained)
        metrics = self._metrics(trained.contents, "train")
        if self._attempt is None:
            self._record(session, trained, {"train": metrics}, {})
        self._given = session.arrays() if trained.record.stepped else None
        return self._given, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages to those who test the model."""
        self._asked.pop("evaluate", None)
        if not self.fraction_evaluate:
            return []
        session = self._session(arrays, server_round, take_over=False)
        fraction, least = self.fraction_evaluate, self.min_evaluate_nodes
        clients = session.evaluators(grid, fraction, least, self._waited)
        messages = session.messages(clients, arrays, config, MessageType.EVALUATE)
        log.info(
            "configure_evaluate: asked %d of %d nodes", len(clients), len(session.directory.online)
        )
        self._asked["evaluate"] = Cohort(tuple(clients)), [m.metadata for m in messages]
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean metrics of the usable replies."""
        asked = self._asked.pop("evaluate", None)
        if asked is None or self.session is None:
            return None
        cohort, sent = asked
        contents = self.session.evaluations(cohort.ids, self._each(sent, replies))
        return self._metrics(contents, "evaluate")

    def _each(
        self, sent: Sequence[Metadata], replies: Iterable[Message]
    ) -> Iterator[tuple[int, Found]]:
        """The replies with their places; one by one, if nobody has looked at them before."""
        if isinstance(replies, Replies) and replies.metadata is sent:
            return replies.each()
        reasons = [f"no reply within {self._waited:g} s"] * len(sent)
        if self._replies is not None:
            left_out = f"{type(self).__name__} left its reply out"
            replies = list(replies)
            for place, found in self._replies.each():
                reasons[place] = why_not(found) or left_out
        return matched(sent, replies, reasons)

    def _log_counts(self, what: str, cohort: Cohort, trained: TrainingResult) -> None:
        bad = sum("rejected" in client for client in trained.record.clients)
        good = len(trained.record.clients) - bad
        if cohort.ids or not bad + good:
            log.info("aggregate_%s: took %d of %d replies", what, good, len(cohort.ids))

    def _begin(self, arrays: ArrayRecord, rounds: int | None = None) -> Session:
        """A new session; only where the number of rounds is known does it use a folder."""
        folder = None if rounds is None else self.folder
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
            memories=folder / "memories" if folder else None,
            resumable=folder is not None,
            patience=self.node_timeout,
            quarantine=self.quarantine,
            adapter=self.adapter,
            filter=self.filter,
            average=self.average,
            buffers=self.buffers,
            guard=self.guard,
            trust=self.trust,
            score=ACCURACY if self.task is None else score_of(as_task(self.task)),
            min_clients=self.min_clients,
            estimator=self.estimator,
        )

    def _session(
        self, arrays: ArrayRecord, server_round: int, *, take_over: bool = True
    ) -> Session:
        """The session of Flower's loop, in which others may have changed the model."""
        if self._attempt is not None and self.session is not None:  # in our own loop
            if take_over and arrays is not self._given:
                self.session.take_over(arrays)
            return self.session
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
        score = session.score
        for name, which in {score.name: "test", "averaged": "averaged"}.items():
            if (value := line.get(f"{which}_{score.name}")) is not None:
                shown = f"{100 * value:.2f} %" if score.share else score.text(value)
                parts.append(f"{name} {shown}")
        parts += [text for text in (record.reason, trained.alarm) if text]
        log.info("\t└──> %s", ", ".join(parts))

    def _conclude(self, session: Session, rounds: int) -> None:
        """Logs how the run went; raises if no round was trained."""
        reason = session.conclude(self.records, rounds)
        if named := worst(clients(self.records), 5):
            log.info("Clients to look at: %s", named)
        if self.fraction_train and rounds and reason is not None:
            raise NothingTrained(
                f"none of {len(self.records)} rounds could be trained, the model is the initial "
                f"one; the last round: {reason}. To try again, raise num_rounds (with "
                "resume=True) or choose another checkpoint_dir"
            )


def _log_start(
    rounds: int, arrays: ArrayRecord, train: ConfigRecord, evaluate: ConfigRecord
) -> None:
    """What Flower's strategies log at the start."""
    log.info("\t├── Number of rounds: %d", rounds)
    size = sum(len(array.data) for array in arrays.values()) / 1024**2
    log.info("\t├── ArrayRecord (%.2f MB)", size)
    for what, config in {"train": train, "evaluate": evaluate}.items():
        text = ", ".join(
            f"{k!r}: {'<bytes>' if isinstance(v, bytes) else v}" for k, v in config.items()
        )
        log.info("\t├── ConfigRecord (%s): %s", what, f"{{{text}}}" if text else "(empty!)")


def _log_metrics(metrics: MetricRecord | None) -> None:
    if metrics is not None:
        log.info("\t└──> Aggregated MetricRecord: %s", metrics)
