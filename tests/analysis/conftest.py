"""Runs' folders made by hand, for the tests of what reads them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fedglad.config.schema import load


def maker(root: Path):
    """Makes the folder of a run of digits with a given result; each a second after the last."""
    made: list[Path] = []

    def make(accuracy: float | None, name: str = "", **settings: Any) -> Path:
        config = load("digits", {k.replace("__", "."): v for k, v in settings.items()})[1]
        folder = root / "runs" / (name or f"digits-{config.hash()}")
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(config.to_toml())
        made.append(folder)
        os.utime(folder / "config.toml", (len(made), len(made)))
        if accuracy is not None:
            summary = {"last10_accuracy": accuracy, "final_accuracy": accuracy + 0.01, "rounds": 60}
            (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return make


@pytest.fixture
def finished(tmp_path: Path):
    """Makes runs' folders for one test."""
    return maker(tmp_path)


SCORES = {
    (0.1, "none"): (0.70, 0.72, 0.74),
    (0.1, "glad"): (0.73, 0.74, 0.78),
    (1.0, "none"): (0.90, 0.90, 0.90),
    (1.0, "glad"): (0.89, 0.91, 0.93),
}


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """none and glad on two partitions, with seeds 1, 2, 3; to be read only."""
    make = maker(tmp_path_factory.mktemp("crossed"))
    return [
        make(score, seed=seed, data__alpha=alpha, adapter__name=name)
        for (alpha, name), scores in SCORES.items()
        for seed, score in enumerate(scores, start=1)
    ]
