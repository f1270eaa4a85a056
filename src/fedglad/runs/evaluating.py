"""Testing the models that a run has left, on its own data or on others; nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedglad.config.schema import Config, ConfigError, load
from fedglad.models.weights import fill
from fedglad.records import Score
from fedglad.runs.exporting import WORDS, state_of
from fedglad.runs.reader import Run, RunError, require_run
from fedglad.runs.trusted_code import load_trusted

if TYPE_CHECKING:
    from fedglad.clients.method import Plain
    from fedglad.runs.models import State


@dataclass(frozen=True)
class Evaluated:
    """One of a run's models, and its metrics.

    | field | meaning |
    |---|---|
    | `which` | model, averaged, best or best_averaged |
    | `round` | after how many rounds it is |
    | `test` | its metrics on the test set by their names; the loss is always among them |
    | `validation` | the same on the validation set; None where there is none |

    >>> Evaluated("averaged", 50, {"loss": 0.5, "accuracy": 0.75}).words
    'average after round 50'
    """

    which: str
    round: int
    test: Mapping[str, float]
    validation: Mapping[str, float] | None = None

    @property
    def words(self) -> str:
        """What it is, for a person."""
        return f"{WORDS[self.which]} after round {self.round}"


@dataclass(frozen=True)
class Evaluation:
    """All models of a run, tested on the same samples.

    >>> from pathlib import Path
    >>> from fedglad.records import Score
    >>> Evaluation(Path("runs/a"), "digits", 360, Score(), ()).to_dict()["data"]
    'digits'
    """

    folder: Path
    data: str
    samples: int
    score: Score
    models: tuple[Evaluated, ...]
    note: str = ""
    """What is not tested: models that clients have of their own; empty if they have none."""

    def text(self, metric: str, value: float | None) -> str:
        """A metric's value for a person."""
        return self.score.of(metric).text(value, 2)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        models = {
            one.which: {k: v for k, v in asdict(one).items() if k != "which"} for one in self.models
        }
        return {
            "folder": str(self.folder),
            "data": self.data,
            "samples": self.samples,
            "score": self.score.to_dict(),
            "models": models,
            **({"note": self.note} if self.note else {}),
        }


def evaluate(
    run: str | Path | Run,
    *,
    data: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    trust_code: bool = False,
) -> Evaluation:
    """Tests a run's models: the last, the average and the best, as far as it has them.

    It is done on the run's own test set, or on that of the section [data] in `data`, a preset or a
    TOML file; `overrides` are keys of that section, {"data.partition": "natural"}. A run that is
    not finished gives the models of its newest checkpoint. Nothing is written. Code that the
    folder names is run only if it was trusted, as in `execute`.

    >>> import pathlib, tempfile
    >>> from fedglad.config import load
    >>> from fedglad.runs import execute
    >>> run = execute(*load("digits", {"rounds": 2}), out=pathlib.Path(tempfile.mkdtemp()))
    >>> done = evaluate(run)
    >>> [one.which for one in done.models], done.samples
    (['model', 'averaged'], 360)
    >>> done.models[0].test["accuracy"] == run.rounds()[-1]["test_accuracy"]
    True
    """
    folder = Path(run.folder if isinstance(run, Run) else run)
    require_run(folder)
    config = config_of(folder, data=data, overrides=overrides, trust_code=trust_code)
    from fedglad.core import batch
    from fedglad.core.layout import split
    from fedglad.simulation.engines.base import Job
    from fedglad.simulation.engines.settings import Serial
    from fedglad.tasks.base import score_of

    plan = config.plan()
    packed = {}
    for which, (state, done) in _states(folder).items():
        fill(plan.model, state, f"{folder}: its {WORDS[which]}")
        layout, parameters, buffers = split(plan.model)
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        packed[which] = (layout.pack(parameters), copies), done
    device = getattr(config.sections["engine"], "device", "auto")
    job = Job(plan.model, plan.data, plan.client, plan.task, plan.seed)
    tested: list[Evaluated] = []
    with closing(Serial(device=device).start(job)) as engine:
        held = engine.worker.held
        for which, (model, done) in packed.items():
            validation = engine.evaluate(model, "validation") if "validation" in held else None
            tested.append(Evaluated(which, done, engine.evaluate(model), validation))
        samples = batch.length(held["test"][0])
    name = config.to_dict()["data"]["name"]
    note = _note(plan.client)
    return Evaluation(folder, name, samples, score_of(plan.task), tuple(tested), note)


def _note(client: Plain) -> str:
    if not client.tests_own:
        return ""
    first = ", in which what is personal is as the run began" if client.has_personal else ""
    return (
        f"these are the server's models{first}; the clients' own are tested in a run with "
        "eval_clients, and its client_scores.jsonl has their scores"
    )


def config_of(
    folder: Path,
    *,
    data: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    trust_code: bool = False,
) -> Config:
    """The configuration that a run's models are tested by, on other data if any are named."""
    given = dict(overrides or {})
    if others := [key for key in given if key.partition(".")[0] not in ("data", "engine")]:
        raise ConfigError(f"{others[0]!r} cannot be set here: data. says on what a model is tested")
    own = {} if data is not None else given
    config = load_trusted(folder / "config.toml", own, trust_code=trust_code)[1]
    if data is not None:
        other = load(data, given)[1]
        other.require_loaded("data")
        names = {*config.own_names().values(), *other.own_names().values()}
        config = Config.of({**config.to_dict(), "data": other.to_dict()["data"]}, names)
    return replace(config, stop_after=0, eval_clients=0)


def _states(folder: Path) -> dict[str, tuple[State, int]]:
    """The models that a run has, and after how many rounds each is."""
    found: dict[str, tuple[State, int]] = {}
    for which in WORDS:
        try:
            state, meta, _ = state_of(folder, which)
        except RunError:
            if which == "model":
                raise
            if (folder / f"{which}.safetensors").exists():  # then it is damaged
                raise
        else:
            found[which] = state, int(meta["round"])
    return found
