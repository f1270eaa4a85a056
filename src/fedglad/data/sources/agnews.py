"""AG News: short news in four classes (Zhang, Zhao & LeCun 2015), for research use.

`agnews` is the official set. `agnews-76k` is what could be pooled of its training texts from public
subsets: not a uniform sample, and the punctuation of some texts differs. Its results are its own.
"""

import csv
import json
from pathlib import Path

import numpy as np

from fedglad.data.sources import DataError, text_arrays

CLASSES = ("1", "2", "3", "4")  # World, Sports, Business, Sci/Tech


def prepare(raw: Path) -> dict[str, np.ndarray]:
    """The texts' bytes and bounds, labels as int64; of either set's training file."""
    [train] = raw.glob("train*")
    rows = of_lines(train) if train.suffix == ".jsonl" else of_csv(train)
    return text_arrays("train", rows) | text_arrays("test", of_csv(raw / "test.csv"))


def of_csv(path: Path) -> list[tuple[int, str]]:
    """Labels from 0 on, and texts: the title, a space, the description."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    for row in rows:
        if len(row) != 3 or row[0] not in CLASSES:
            raise DataError(f"{path.name} has a row that is not class, title, description: {row}")
    return [(int(label) - 1, f"{title} {description}") for label, title, description in rows]


def of_lines(path: Path) -> list[tuple[int, str]]:
    """Labels and texts, a JSON object each a line."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [(row["label"], row["text"]) for row in rows]
