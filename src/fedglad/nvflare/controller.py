"""FedGLAD for NVFlare's ModelController API: our Server behind a controller of a job."""

# pyright: reportMissingTypeStubs=false

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from os import PathLike
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.model_controller import ModelController

from fedglad.adapters import Adapter, Glad
from fedglad.averages import Average, NoAverage
from fedglad.core import malloc
from fedglad.core.guard import Guard
from fedglad.estimators import Estimator
from fedglad.federation.folder import opened
from fedglad.federation.session import AVERAGED, TrainingResult
from fedglad.filters import Filter
from fedglad.nvflare.replies import mean_metrics
from fedglad.nvflare.session import LOGGER, Session
from fedglad.nvflare.settings import Everyone
from fedglad.optimizers import SGD, Optimizer
from fedglad.samplers.base import Sampler
from fedglad.samplers.uniform import Uniform
from fedglad.server.compatibility import refuse
from fedglad.weights import Samples

EvaluateFn = Callable[[int, Mapping[str, Any]], Mapping[str, float] | None]


class NothingTrained(RuntimeError):
    """A run in which no round could be stepped: its model is the one it began with."""


class Aborted(Exception):
    """NVFlare wants the job to end."""


class FedGLAD(ModelController):
    """Any of fedglad's server optimizers, adapters, weightings, filters and samplers on NVFlare.

    >>> from fedglad.optimizers import Adam
    >>> controller = FedGLAD(num_clients=5, num_rounds=100, optimizer=Adam(lr=5e-3))
    >>> controller.adapter, controller.records  # which fill while the job runs
    (Glad(groups='tensor', min_group=1, gamma=0.02, beta=0.9), [])

    It takes the place of NVFlare's FedAvg. Clients stay as they are: they reply with an FLModel
    that has their full weights or the differences, tensors or NumPy arrays.

    | argument | meaning |
    |---|---|
    | `num_clients`, `num_rounds` | as of FedAvg; None: all clients that are connected |
    | `model` | the initial one, {name: array}, in place of the persistor's |
    | `optimizer`, `adapter`, `filter`, `weighting`, `buffers`, `guard` | as of `fedglad.Server` |
    | `estimator` | as of `fedglad.Server`: of the mean of all clients, by what they sent before |
    | `average` | of the server's models, as of `fedglad.Server`; to be read as `averaged` |
    | `evaluate` | called with the round and the params, tests at the server: {metric: number} |
    | `min_clients` | with fewer good replies a round is tried again, then skipped |
    | `sampler` | who takes part; its own `clients_per_round` takes the place of num_clients |
    | `sizes` | {site: number of samples}, for a sampler that needs them |
    | `seed` | of the cohorts, for a sampler with `seed="run"` |
    | `weighted_by` | the entry of a reply's meta that is its weight; None: all count alike |
    | `round_timeout` | seconds that a round's replies are waited for; None: without an end. |
    |                 | NVFlare may never notice that a client was killed |
    | `retries` | other cohorts that are asked when too few replies were good |
    | `checkpoint_dir` | the run's folder; starting again with it goes on from the last round |

    In a job's JSON file each of them that is an object is written as NVFlare writes components:
    `{"path": "fedglad.optimizers.Adam", "args": {"lr": 0.005}}`.

    `records` has one dict a round, in the fields of a run's rounds.jsonl.
    """

    def __init__(
        self,
        num_clients: int | None = None,
        num_rounds: int = 5,
        *,
        model: Mapping[str, Any] | FLModel | None = None,
        optimizer: Optimizer | None = None,
        adapter: Adapter | None = Glad(),  # noqa: B008 - frozen
        filter: Filter | None = None,
        weighting: Samples | None = None,
        estimator: Estimator | None = None,
        average: Average | None = None,
        evaluate: EvaluateFn | None = None,
        buffers: Iterable[str] | None = None,
        guard: Guard | None = Guard(),  # noqa: B008 - frozen
        min_clients: int = 1,
        sampler: Sampler | None = None,
        sizes: Mapping[str, int] | None = None,
        seed: int = 0,
        weighted_by: str | None = "NUM_STEPS_CURRENT_ROUND",
        round_timeout: float | None = 3600.0,
        retries: int = 2,
        checkpoint_dir: str | PathLike[str] | None = None,
        task_name: str = "train",
        persistor_id: str = AppConstants.DEFAULT_PERSISTOR_ID,
        task_check_period: float = 0.5,
    ) -> None:
        super().__init__(
            persistor_id=persistor_id,
            ignore_result_error=True,  # a client that fails is left out, whatever the others do
            task_check_period=task_check_period,
        )
        # What NVFlare itself says goes to its log alone, not into that of the run's folder.
        self.logger = logging.getLogger(LOGGER)
        for name, value in {"num_clients": num_clients, "num_rounds": num_rounds}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r}: must be 1 or more")
        if sampler is not None and num_clients is not None:
            raise ValueError(
                f"num_clients={num_clients!r} and a sampler: its clients_per_round says how many "
                "take part; give one of the two"
            )
        if sampler is not None and sampler.needs_sizes and not sizes:
            raise ValueError(
                f"{type(sampler).__name__} needs the clients' numbers of samples: "
                "sizes={'site-1': 600, ...}"
            )
        if round_timeout is not None and not 0 < round_timeout < math.inf:
            raise ValueError(f"round_timeout={round_timeout!r}: must be positive, in seconds")
        if min_clients < 1:
            raise ValueError(f"min_clients={min_clients!r}: a round needs at least one client")
        most = sampler.clients_per_round if sampler else num_clients
        if most is not None and min_clients > most:
            raise ValueError(
                f"min_clients={min_clients} is more than the {most} clients of a round: no round "
                "could be trained"
            )
        if retries < 0:
            raise ValueError(f"retries={retries!r}: must be 0 or more")
        refuse(
            adapter or Adapter(),
            filter or Filter(),
            weighting or Samples(),
            sampler=sampler,
            server=optimizer,
            estimator=estimator,
            average=average,
        )
        # Each under its own name: by these NVFlare writes a job that was made in Python.
        self.num_clients, self.num_rounds, self.model = num_clients, num_rounds, model
        self.optimizer, self.adapter, self.filter = optimizer, adapter, filter
        self.weighting, self.estimator = weighting, estimator
        self.average = None if isinstance(average, NoAverage) else average
        self.evaluate, self.guard, self.min_clients = evaluate, guard, min_clients
        self.buffers = None if buffers is None else list(buffers)
        self.sampler, self.sizes, self.seed = sampler, sizes, seed
        self.weighted_by, self.round_timeout, self.retries = weighted_by, round_timeout, retries
        self.checkpoint_dir = None if checkpoint_dir is None else str(checkpoint_dir)
        self.task_name = task_name
        self.records: list[dict[str, Any]] = []
        self.session: Session | None = None
        self._errors: dict[str, str] = {}  # of the present task, by site
        self._received: set[str] = set()  # whose reply to it NVFlare has taken

    @property
    def averaged(self) -> dict[str, Any]:
        """The average of the models so far: names, order and kinds of the initial params."""
        if self.session is None:
            raise ValueError("there is no average yet: it is there once the job runs")
        return self.session.averaged()

    def run(self) -> None:
        """The rounds that are left; called by NVFlare."""
        malloc.give_back()
        if (params := self._initial()) is None:
            return  # NVFlare has said why, and ends the job
        session = self.session = self._begin(params)
        folder = opened(self.checkpoint_dir, session, self.num_rounds)
        self._set(AppConstants.NUM_ROUNDS, self.num_rounds)
        try:
            with closing(session), folder as (self.records, write):
                self._publish(params := session.params())
                if session.t >= self.num_rounds:
                    self._save(params)
                initial = self.evaluate(0, params) if self.evaluate and not session.t else None
                for t in range(session.t, self.num_rounds):
                    session.info("[ROUND %d/%d]", t + 1, self.num_rounds)
                    params = self._round(session, {"initial": initial} if t == 0 else {})
                    write(self.records[-1])
                    self._save(params)
                self._conclude(session)
        except Aborted:
            session.warn("The job is stopped after %d of %d rounds", session.t, self.num_rounds)

    def _conclude(self, session: Session) -> None:
        """Logs how the run went; raises if no round was trained."""
        if (reason := session.conclude(self.records, self.num_rounds)) is not None:
            raise NothingTrained(
                f"none of {len(self.records)} rounds could be trained, the model is the initial "
                f"one; the last round: {reason}. To try again, raise num_rounds or choose another "
                "checkpoint_dir"
            )

    def _initial(self) -> Mapping[str, Any] | None:
        model = self.model if self.model is not None else self.load_model()
        return model.params if isinstance(model, FLModel) else model

    def _begin(self, params: Mapping[str, Any]) -> Session:
        drawn: Sampler = Everyone(seed="run")
        if self.num_clients is not None:
            drawn = Uniform(clients_per_round=self.num_clients, seed="run")
        return Session(
            params,
            self,
            sampler=self.sampler or drawn,
            optimizer=self.optimizer or SGD(),
            weighting=self.weighting,
            rounds=self.num_rounds,
            seed=self.seed,
            task=self.task_name,
            weighted_by=self.weighted_by,
            sizes=self.sizes,
            memories=Path(self.checkpoint_dir) / "memories" if self.checkpoint_dir else None,
            adapter=self.adapter,
            filter=self.filter,
            average=self.average,
            buffers=self.buffers,
            guard=self.guard,
            min_clients=self.min_clients,
            estimator=self.estimator,
        )

    def _round(self, session: Session, metrics: dict[str, Any]) -> dict[str, Any]:
        """One round and its record; the model after it."""
        self._set(AppConstants.CURRENT_ROUND, session.t)
        self.event(AppEventType.ROUND_STARTED)
        begin = perf_counter()
        trained = session.train(self.retries)
        self.event(AppEventType.BEFORE_AGGREGATION)  # its listeners look at the model of before
        metrics["train"] = mean_metrics(trained.contents) if trained.contents else None
        middle = perf_counter()
        params = session.params()
        self._publish(params)
        self.event(AppEventType.AFTER_AGGREGATION)
        if self.evaluate:
            # The newest last: what the function leaves behind of a round is of that.
            if self.average is not None and self.average.test:
                metrics[f"{AVERAGED}server"] = self.evaluate(session.t + 1, session.averaged())
            metrics["server"] = self.evaluate(session.t + 1, params)
        seconds = {"train": middle - begin, "test": perf_counter() - middle}
        self._record(session, trained, metrics, seconds)
        return params

    def _record(
        self,
        session: Session,
        trained: TrainingResult,
        metrics: dict[str, Any],
        seconds: dict[str, float],
    ) -> None:
        """Adds the round to the records and moves on."""
        line = session.line(trained, metrics, seconds)
        self.records.append(line)
        session.t += 1
        record = trained.record
        parts = [record.status if record.gsi_all is None else f"GSI {record.gsi_all:.3f}"]
        for name, key in {"accuracy": "test_accuracy", "averaged": "averaged_accuracy"}.items():
            if (accuracy := line.get(key)) is not None:
                parts.append(f"{name} {100 * accuracy:.2f} %")
        parts += [text for text in (record.reason, trained.alarm) if text]
        session.info("    %s", ", ".join(parts))

    def _publish(self, params: dict[str, Any]) -> None:
        """Tells NVFlare's other components which model is the newest."""
        learnable = make_model_learnable(params, {})
        self.fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, learnable, private=True, sticky=True)

    def _save(self, params: dict[str, Any]) -> None:
        """Saves the newest model where users of NVFlare look for it."""
        if self.persistor:
            self.save_model(FLModel(params_type=ParamsType.FULL, params=params))

    def _set(self, key: str, value: Any) -> None:
        self.fl_ctx.set_prop(key, value, private=True, sticky=False)

    # What the session asks of the transport.

    def sites(self) -> list[str]:
        """The names of the clients that are connected."""
        assert self.engine is not None
        names: list[str] = [client.name for client in self.engine.get_clients()]
        return [name for name in names if self.get_client_disconnect_time(name) is None]

    def ask(
        self, sites: Sequence[str], params: Mapping[str, Any], t: int, task: str
    ) -> Iterator[FLModel | str]:
        """The clients' replies in this order; a text in place of one says why there is none.

        They come in any order, and wait until it is their turn: so the bits do not depend on it.
        """
        arrived: dict[str, FLModel] = {}
        news = threading.Condition()

        def take(reply: FLModel) -> None:
            with news:
                arrived[reply.meta["client_name"]] = reply
                news.notify()

        self._errors, self._received = errors, received = dict[str, str](), set[str]()
        seconds = math.ceil(self.round_timeout or 0)  # NVFlare's 0: without an end
        model = FLModel(params_type=ParamsType.FULL, params=params, current_round=t)
        model.start_round, model.total_rounds = 0, self.num_rounds
        begin = monotonic()
        self.send_model(task, model, targets=[*sites], timeout=seconds, callback=take)
        del model, params
        for site in sites:
            while site not in errors:
                if self.abort_signal.triggered:
                    raise Aborted
                over = self.get_num_standing_tasks() == 0  # asked first: it ends with a reply
                with news:
                    if site in arrived or over:
                        break
                    news.wait(self._task_check_period)
            silent = "it is gone"
            if site in received:
                silent = "its reply is no FLModel"
            elif seconds and monotonic() - begin >= seconds:
                silent = f"no reply within {seconds} s"
            yield arrived.pop(site, None) or errors.get(site, silent)

    def _accept_train_result(
        self,
        client_name: str,
        result: Shareable,
        fl_ctx: FLContext,
        is_unknown_task: bool = False,
    ) -> bool:
        """As NVFlare's; keeps the error of a client that failed at the present task."""
        accepted = super()._accept_train_result(client_name, result, fl_ctx, is_unknown_task)
        if accepted and not is_unknown_task:
            self._received.add(client_name)
        elif not is_unknown_task:
            self._errors[client_name] = f"the client failed: {result.get_return_code()}"
        return accepted
