"""Run folders made by hand, for the report's tests."""

import json
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedglad.runs.reader import Run, RunView

CONFIG: dict[str, Any] = {
    "rounds": 3,
    "seed": 1,
    "data": {"name": "digits", "seed": 0},
    "sampler": {"name": "uniform"},
    "adapter": {"name": "glad", "gamma": 0.02},
    "engine": {"name": "local"},
}


def record(t: int, **changes: Any) -> dict[str, Any]:
    """A round in which two clients took part, and the one group had the factor 1."""
    return {
        "round": t,
        "status": "stepped",
        "clients": [
            {"id": 0, "weight": 0.25, "loss": 1.5, "sq_norm": 4.0},
            {"id": 1, "weight": 0.75, "loss": 0.5, "sq_norm": 9.0},
        ],
        "train_loss": 0.75,
        "gsi_all": 2.0,
        "gsi_unfiltered": 2.0,
        "tensors": {},
        "groups": {"w": {"gsi": 2.0, "baseline": 2.0, "scale": 1.0}},
        "test_loss": 0.6,
        "test_accuracy": 0.8,
        "label_similarity": 0.9,
        "alarm": None,
        "seconds": {"train": 1.0, "test": 0.5},
        **changes,
    }


def toml(config: Mapping[str, Any]) -> str:
    """JSON's strings, numbers and lists are TOML's."""
    sections = {key: value for key, value in config.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in config.items() if key not in sections]
    for name, section in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def changed(**changes: Any) -> dict[str, Any]:
    """CONFIG with other values: adapter__name="none"."""
    config: dict[str, Any] = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (config[section] if section else config)[name] = value
    return config


def write(
    folder: Path,
    records: Iterable[Mapping[str, Any]] = (),
    *,
    config: Mapping[str, Any] | None = CONFIG,
    labels: Any = None,
    finish: bool = False,
) -> Path:
    """A run's folder; `finish` also writes its summary."""
    folder.mkdir(parents=True, exist_ok=True)
    records = list(records)
    if config is not None:
        (folder / "config.toml").write_text(toml(config))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if labels is not None:
        (folder / "labels.json").write_text(json.dumps({"counts": labels}))
    if finish:
        tested = [r["test_accuracy"] for r in records if r["test_accuracy"] is not None]
        told = {
            "last10_accuracy": sum(tested[-10:]) / len(tested[-10:]),
            "final_accuracy": tested[-1],
            "rounds": len(records),
            "seconds": sum(sum(r["seconds"].values()) for r in records),
            "versions": {"format": 2},
        }
        (folder / "summary.json").write_text(json.dumps(told))
    return folder


def read(folder: Path) -> RunView:
    """A run's folder as a report reads it."""
    return Run(folder).read()


def rounds(accuracies: Iterable[float | None], **changes: Any) -> list[dict[str, Any]]:
    return [record(t, test_accuracy=found, **changes) for t, found in enumerate(accuracies)]


def hear_ctrl_c() -> None:
    """In a child: what runs in a shell's background ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
