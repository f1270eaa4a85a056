"""Finished runs, whichever way they were started: from their folders, or from results/*.json.

Both are read into the same columns, so that a table made from either is the same. A run is found
by its configuration as today's code reads it, without what does not change its rounds.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from fedglad.analysis.curves import Series
from fedglad.analysis.statistics import spread
from fedglad.averages import NoAverage
from fedglad.config.keys import flat
from fedglad.config.presets import shortened
from fedglad.config.schema import FORMAT, KEEPING, Config, ConfigError, load
from fedglad.core.files import write_text
from fedglad.runs.reader import Run, RunError, run_folders
from fedglad.runs.summary import summarise, summary_damage
from fedglad.runs.sweeping import first_rounds
from fedglad.studies.paper.cells import PaperError

DIGITS = 6  # of GSI and factors: a deep model has hundreds in a round
AVERAGED = ("last10_averaged_accuracy", "final_averaged_accuracy")
"""What a summary has beside the others if the run kept an average of its models."""
IGNORED = ("rounds", "seed", "checkpoint_every", *KEEPING)
"""Keys that tell the repetitions of a cell apart, or change nothing in a round."""

Columns = Mapping[str, Any]
"""What is kept of the rounds, one list a name; `groups` has lists of its own by group."""


@dataclass(frozen=True)
class Correlation:
    """GSI and label similarity of the rounds; the interval takes the rounds as independent."""

    similarity: list[float]
    gsi: list[float]
    r: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: what it was, where it is read from, and what is read off its rounds."""

    path: Path
    config: Config
    summary: Mapping[str, Any]

    @cached_property
    def columns(self) -> Columns:
        """The rounds."""
        if self.path.is_dir():
            return columns(Run(self.path).rounds()[: self.config.rounds])
        return json.loads(self.path.read_text("utf-8"))["rounds"]

    def series(self, name: str) -> Series:
        """One number by round."""
        values = enumerate(self.columns[name], start=1)
        return {t: value for t, value in values if value is not None}

    @property
    def accuracy(self) -> list[float]:
        """Of the rounds that were tested, in percent."""
        return [100 * value for value in self.series("test_accuracy").values()]

    def last10(self) -> float:
        """The paper's figure: the mean accuracy over the last 10 rounds that were tested."""
        return 100 * self.summary["last10_accuracy"]

    def last10_averaged(self) -> float | None:
        """The same of the average of its models, where one was kept and tested."""
        value = self.summary.get("last10_averaged_accuracy")
        return None if value is None else 100 * value

    def norm_ratio(self) -> float:
        """std/mean of the updates' squared norms, averaged over the rounds."""
        return fmean(self.series("norm_ratio").values())

    def correlation(self) -> Correlation:
        """Pearson's r, with Fisher's 95 % interval; None where a side does not vary."""
        similarity, gsi = self.series("label_similarity"), self.series("gsi_all")
        known = [t for t in similarity if t in gsi]
        x, y = [similarity[t] for t in known], [gsi[t] for t in known]
        if len(known) < 3 or min(np.ptp(x), np.ptp(y)) == 0:
            return Correlation(x, y, None, None)
        r = float(np.corrcoef(x, y)[0, 1])
        if len(known) == 3 or abs(r) >= 1:
            return Correlation(x, y, r, None)
        z, half = math.atanh(r), 1.96 / math.sqrt(len(known) - 3)
        return Correlation(x, y, r, (math.tanh(z - half), math.tanh(z + half)))

    def fluctuations(self) -> list[dict[str, Any]]:
        """GSI of every group over the rounds, in the order of the model; `relative` is std/mean."""
        groups: list[dict[str, Any]] = []
        for name, parts in self.columns["groups"].items():
            values = [value for value in parts["gsi"] if value is not None]
            mean, std = fmean(values), spread(values) or 0.0
            numbers = {"mean": mean, "std": std, "relative": std / mean}
            groups.append({"group": name, **numbers, "lowest": min(values), "highest": max(values)})
        return groups

    def bad_round(self) -> dict[str, Any]:
        """The scripted round t: accuracy before and after it, its GSI and the lowest of the others.

        Both accuracies have to be tested.
        """
        sampler = self.config.to_dict()["sampler"]
        t = min(map(int, {**sampler.get("cohorts", {}), **sampler.get("largest_class", {})}))
        gsi, tested = self.columns["gsi_all"], self.columns["test_accuracy"]
        if tested[t - 1] is None or tested[t] is None:
            raise PaperError(f"{self.path}: rounds {t - 1} and {t} were not tested: eval_every=1")
        return {
            "t": t,
            "before": 100 * tested[t - 1],
            "after": 100 * tested[t],
            "gsi": gsi[t],
            "lowest_other": min(v for k, v in enumerate(gsi) if k != t and v is not None),
        }

    def to_dict(self) -> dict[str, Any]:
        """The file in results/."""
        tree = self.config.to_dict()
        short = shortened(flat(tree))
        return {
            "config": _plain(tree),
            "hash": self.config.hash(),
            **({"shortened": short} if short else {}),
            "last10_accuracy": self.summary["last10_accuracy"],
            **{name: self.summary[name] for name in AVERAGED if name in self.summary},
            "skipped": self.summary.get("skipped", 0),
            **{key: self.summary.get(key) for key in ("seconds", "versions", "machine")},
            "rounds": self.columns,
        }


def key(config: Config) -> str:
    """The same for all repetitions and lengths of a cell, and for engines with the same bits."""
    tree = {name: value for name, value in config.to_dict().items() if name not in IGNORED}
    if getattr(config.sections["engine"], "exact", True):
        del tree["engine"]
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def columns(rounds: Sequence[Mapping[str, Any]]) -> Columns:
    """The rounds of a run by name; of the clients only who they were."""
    simple = ("test_accuracy", "test_loss", "train_loss", "label_similarity")
    averaged = ("averaged_accuracy", "averaged_loss")
    simple += averaged if any(averaged[0] in r for r in rounds) else ()
    names = dict.fromkeys(name for r in rounds for name in r["groups"])
    return {
        **{name: [r.get(name) for r in rounds] for name in simple},
        "gsi_all": [_short(r.get("gsi_all")) for r in rounds],
        "norm_ratio": [_short(_norm_ratio(r["clients"])) for r in rounds],
        "clients": [[client["id"] for client in r["clients"]] for r in rounds],
        "seconds": [round(math.fsum(r["seconds"].values()), 3) for r in rounds],
        "groups": {
            name: {
                part: [_short(r["groups"].get(name, {}).get(part)) for r in rounds]
                for part in ("gsi", "scale")
            }
            for name in names
        },
    }


class Library:
    """The finished runs in some folders; `broken` has why others could not be read."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.notes: list[str] = []
        self.broken: list[str] = []
        self._runs: dict[str, dict[tuple[int, int], FinishedRun]] = {}
        self._with_average: dict[str, dict[tuple[int, int], FinishedRun]] = {}
        for folder in folders:
            for path in sorted(folder.glob("*")) if folder.is_dir() else []:
                self._add(path)

    def find(self, config: Config) -> dict[tuple[int, int], FinishedRun]:
        """Every repetition of the configuration, by (rounds, seed)."""
        same = key(config)
        return {**self._runs.get(same, {}), **self._with_average.get(same, {})}

    def has(self, config: Config) -> bool:
        """Whether this very run is there."""
        return (config.rounds, config.seed) in self.find(config)

    def all(self) -> list[FinishedRun]:
        """Every run, each once."""
        return [result for same in self._runs.values() for result in same.values()]

    def _add(self, path: Path) -> None:
        try:
            result = read(path)
        except PaperError as error:
            self.broken.append(str(error))
            return
        if result is None:
            return
        versions = result.summary.get("versions")
        written = versions.get("format", 1) if isinstance(versions, dict) else 1
        if written != FORMAT:
            self.notes.append(
                f"{path} was made by format {written} of fedglad: today's random draws are others"
            )
        number = result.config.rounds, result.config.seed
        self._runs.setdefault(key(result.config), {}).setdefault(number, result)
        if not isinstance(result.config.sections["average"], NoAverage):
            # Its rounds are those of the run without an average, and it shows more.
            plain = {**result.config.sections, "average": NoAverage()}
            without = key(replace(result.config, sections=plain))
            self._with_average.setdefault(without, {}).setdefault(number, result)


def read(path: Path) -> FinishedRun | None:
    """A run's folder or a file of results/; None if it is neither, or not finished."""
    try:
        if (path / "config.toml").is_file():
            summary = Run(path).summary
            if summary is None:
                return None
            if damage := summary_damage(summary):
                raise RunError(f"summary.json is damaged: {damage}")
            return FinishedRun(path, load(path / "config.toml")[1], summary)
        if path.suffix != ".json" or not path.is_file():
            return None
        tree: Any = json.loads(path.read_text("utf-8"))
        config = Config.of(_restored(tree["config"]), trusted=())
        summary = {name: value for name, value in tree.items() if name not in ("config", "rounds")}
        return FinishedRun(path, config, summary)
    except (RunError, ConfigError, ValueError, KeyError, TypeError, OSError) as error:
        raise PaperError(f"{path} cannot be read: {error}") from None


def first(folder: Path, rounds: int) -> FinishedRun | None:
    """The first rounds of a run, finished or not, as the run that ends there; None if it has fewer.

    The server's rate falls as in the whole run.
    """
    try:
        run, config = Run(folder), load(folder / "config.toml")[1]
        records, summary = run.rounds()[:rounds], run.summary or {}
        # Where and with what an unfinished run was made is not known: taken to be here and now.
        made = {key: summary[key] for key in ("versions", "machine") if summary}
        summary = {**summarise(records), **made}
    except (RunError, ConfigError, ValueError, OSError) as error:
        raise PaperError(f"{folder} cannot be read: {error}") from None
    if len(records) < rounds:
        return None
    return FinishedRun(folder, first_rounds(config, rounds), summary)


def export(
    paths: Sequence[Path], to: Path, *, rounds: int | None = None
) -> tuple[list[Path], list[str]]:
    """Writes the finished runs among the paths as files of results/; those, and notes on others.

    With `rounds`, the first so many of all runs that have them, which are then shortened ones.
    """
    written: list[Path] = []
    notes: list[str] = []
    for folder in run_folders(paths, files=("config.toml",)):
        try:
            result = first(folder, rounds) if rounds else read(folder)
        except PaperError as error:
            notes.append(str(error))
            continue
        if result is None:
            why = f"fewer than {rounds} rounds" if rounds else "unfinished"
            notes.append(f"{folder} is left out: {why}")
            continue
        # Of code that is not loaded the name may be anything, also a path.
        data = re.sub(r"[^\w.-]", "-", result.config.to_dict()["data"]["name"])[:80]
        target = to / f"{data}-{result.config.hash()}.json"
        text = _text(result.to_dict())
        to.mkdir(parents=True, exist_ok=True)
        if not target.is_file() or target.read_text("utf-8") != text:
            write_text(target, text)
        written.append(target)
    return written, notes


def _text(tree: Mapping[str, Any]) -> str:
    """JSON with a line for each name, so that two files can be compared."""

    def line(name: str, value: Any) -> str:
        return f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}"

    rounds = ",\n  ".join(line(*item) for item in tree["rounds"].items())
    others = [line(name, value) for name, value in tree.items() if name != "rounds"]
    return "{\n " + ",\n ".join([*others, f'"rounds": {{\n  {rounds}\n }}']) + "\n}\n"


def _norm_ratio(clients: Sequence[Mapping[str, Any]]) -> float | None:
    """std/mean of the accepted updates' squared norms, the deviation with n in its denominator."""
    squares = [
        c["sq_norm"] for c in clients if c.get("sq_norm") is not None and "rejected" not in c
    ]
    mean = fmean(squares) if squares else 0.0
    return pstdev(squares) / mean if mean else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _plain(value: Any) -> Any:
    """Numbers that JSON has not, as texts."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _restored(inner) for name, inner in value.items()}
    return float(value) if value in ("inf", "-inf", "nan") else value
