"""MLflow: a database file, without a server."""

import logging
import os
import shlex
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

from fedglad.report.trackers.names import Row, Start

EXPERIMENT = "fedglad"
MARK = "fedglad.id"
LAST = "cohort/size"  # every round has it; written last, it says that the round is complete
METRICS, PARAMS = 1000, 100  # MLflow takes so many at once
MODULES = (
    "mlflow",
    "mlflow.entities",
    "mlflow.exceptions",
    "sqlalchemy.exc",
    "mlflow.store.tracking.sqlalchemy_store",
)
LONGEST = 6000  # characters of a parameter


class MLflow:
    """OUT/mlflow.db, experiment `fedglad`, one run for each; an earlier one is continued.

    Settings are parameters. The time axis is the run's own.
    """

    shown = "MLflow"
    errors: ClassVar[tuple[type[Exception], ...]] = ()

    def __init__(self, start: Start) -> None:
        mlflow, self._entities = self.load()
        self._file = start.out / "mlflow.db"
        self._started = self._end = start.started
        self._client: Any = mlflow.MlflowClient(f"sqlite:///{self._file.absolute()}")
        self._run = self._find(start)
        history = self._client.get_metric_history(self._run, LAST)
        self._seen = max((metric.step for metric in history), default=0)

    @staticmethod
    def load() -> Any:
        """The library, which else would count its use and log what its database does."""
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "true"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of its own libraries
            mlflow, entities, exceptions, sql, _ = map(import_module, MODULES)
        MLflow.errors = (exceptions.MlflowException, sql.SQLAlchemyError)
        for chatty in ("mlflow", "alembic"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        return mlflow, entities

    def write(self, rows: Sequence[Row]) -> None:
        metrics: list[Any] = []
        for row in rows:
            self._end = self._started + row.seconds
            if row.step <= self._seen:
                continue
            last = {LAST: row.scalars[LAST]}
            ordered = {name: v for name, v in row.scalars.items() if name != LAST} | last
            metrics += self._metrics(ordered, row.step)
        self._log(metrics)

    def close(self, summary: dict[str, float] | None, step: int) -> None:
        if summary and self._client.get_run(self._run).info.status != "FINISHED":
            self._log(self._metrics(summary, step))
            self._client.set_terminated(self._run, "FINISHED", end_time=_ms(self._end))

    @property
    def command(self) -> str:
        # What is enough to write the file has no page to show it with.
        there = find_spec("flask") and find_spec("mlflow.server")
        first = "" if there else "pip install mlflow && "
        return f"{first}mlflow ui --backend-store-uri {shlex.quote(f'sqlite:///{self._file}')}"

    def _find(self, start: Start) -> str:
        """The run in the database, made if it is not there."""
        known = self._client.get_experiment_by_name(EXPERIMENT)
        if known:
            experiment = known.experiment_id
        else:
            files = (start.out.absolute() / "artifacts").as_uri()
            experiment = self._client.create_experiment(EXPERIMENT, artifact_location=files)
        runs = self._client.search_runs([experiment], f"tags.`{MARK}` = '{start.id}'")
        if runs:
            return runs[0].info.run_id
        tags, began = {MARK: start.id}, _ms(start.started)
        made = self._client.create_run(experiment, began, tags, run_name=start.name)
        run = made.info.run_id
        param, config = self._entities.Param, start.config
        params = [param(key, str(value)[:LONGEST]) for key, value in config.items()]
        for k in range(0, len(params), PARAMS):
            self._client.log_batch(run, params=params[k : k + PARAMS])
        return run

    def _metrics(self, scalars: dict[str, float], step: int) -> list[Any]:
        when = _ms(self._end)
        metric = self._entities.Metric
        return [metric(name, value, when, step) for name, value in scalars.items()]

    def _log(self, metrics: Sequence[Any]) -> None:
        for k in range(0, len(metrics), METRICS):
            self._client.log_batch(self._run, metrics=metrics[k : k + METRICS])


def _ms(seconds: float) -> int:
    return int(1000 * seconds)
