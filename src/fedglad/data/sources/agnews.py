"""AG News: short news in four classes (Zhang, Zhao & LeCun 2015), for research use.

`agnews` is the official set. `agnews-76k` is what could be pooled of its training texts from public
subsets: not a uniform sample, and the punctuation of some texts differs. Its results are its own.
"""

import csv
import json
from pathlib import Path

import numpy as np

from fedglad.data.fetch import Folder, Web
from fedglad.data.sources import DataError, File, Recipe, text_arrays

CLASSES = ("1", "2", "3", "4")  # World, Sports, Business, Sci/Tech
TRAIN = File(name="train.csv", checksum="md5:b1a00f826fdfbd249f79597b59e1dc12")
TEST = File(name="test.csv", checksum="md5:d52ea96a97a2d943681189a97654912d", size=1_857_427)
POOLED = File(
    name="train_partial_76306.jsonl",
    checksum="sha256:b07df3e68139fd700d51c5f4fd017344d0c7bd602c8c3f200cd4ca1c8232087b",
    size=20_010_162,
)
POOLED_XZ = File(
    name=f"{POOLED.name}.xz",
    checksum="sha256:8f8c770ee3befd6704bfed75c297a667eeae4bfba1e28cd18341adcf987ad956",
    members={POOLED.name: POOLED.name},
)
TEST_XZ = File(name="test.csv.xz", members={TEST.name: TEST.name})


def prepare(raw: Path) -> dict[str, np.ndarray]:
    """The texts' bytes and bounds, labels as int64."""
    return _arrays("train", of_csv(raw / TRAIN.name)) | _arrays("test", of_csv(raw / TEST.name))


def prepare_part(raw: Path) -> dict[str, np.ndarray]:
    """The same, with the training texts of the pooled file."""
    return _arrays("train", of_lines(raw / POOLED.name)) | _arrays("test", of_csv(raw / TEST.name))


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


def _arrays(part: str, rows: list[tuple[int, str]]) -> dict[str, np.ndarray]:
    return text_arrays(part, (text for _, text in rows), (label for label, _ in rows))


HOME = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
TGZ = File(
    name="ag_news_csv.tgz",
    members={f"ag_news_csv/{file.name}": file.name for file in (TRAIN, TEST)},
)
RECIPE = Recipe(
    name="agnews",
    about="Short news: 120,000 + 7,600 texts, 4 classes.",
    files=(TRAIN, TEST),
    places=(
        Web(base=HOME, packs=(TRAIN, TEST)),
        Web(base="https://s3.amazonaws.com/fast-ai-nlp/", packs=(TGZ,)),
    ),
    prepare=prepare,
)
PART = Recipe(
    name="agnews-76k",
    about="A part of AG News, not its results: 76,306 of 120,000 + 7,600 texts, 4 classes.",
    files=(POOLED, TEST),
    places=(
        Folder(
            hint=f"{POOLED_XZ.name} and {TEST_XZ.name}: no public place has the first",
            packs=(POOLED_XZ, TEST_XZ),
        ),
    ),
    prepare=prepare_part,
)
