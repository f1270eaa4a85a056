"""Federations of tables: Hugging Face data sets and Flower's."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedglad import simulate
from fedglad.data import from_datasets, from_flower, from_huggingface

datasets: Any = pytest.importorskip("datasets")
Dataset, DatasetDict = datasets.Dataset, datasets.DatasetDict
datasets.disable_progress_bars()

USERS = ["b", "a", "b", "c", "b", "a"]
ROWS: dict[str, list[Any]] = {
    "user": USERS,
    "age": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "height": [10, 20, 30, 40, 50, 60],
    "label": [0, 1, 1, 0, 2, 1],
}
TABLE = Dataset.from_dict(ROWS)
TINY: dict[str, Any] = {"rounds": 1, "sampler": {"clients_per_round": 2}}


def tokens() -> Any:
    ids = [[5, 6, 7], [8], [9, 9], [1, 2, 3]]
    mask = [[1] * len(row) for row in ids]
    rows = {"who": [7, 7, 3, 3], "input_ids": ids, "mask": mask, "label": [0, 1, 0, 1]}
    return Dataset.from_dict(rows)


# Hugging Face


def test_every_value_of_a_column_is_a_client():
    data: Any = from_huggingface(TABLE, by="user", test=TABLE)
    # a: rows 1, 5; b: rows 0, 2, 4; c: row 3
    assert data.names == ("a", "b", "c")
    assert [data.size(k) for k in range(3)] == [2, 3, 1]
    x, y = data.client(1)
    assert x.tolist() == [[1, 10], [3, 30], [5, 50]]
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert y.tolist() == [0, 1, 2]
    assert data.classes == 3
    assert [data.labels(k).tolist() for k in range(3)] == [[0, 2, 0], [1, 1, 1], [1, 0, 0]]
    assert len(data.test()[1]) == 6
    assert data.client_test(0) is None


def test_numbers_are_in_their_order_and_stay_numbers():
    rows = {"id": [10, 9, 10], "x": [[1.0], [2.0], [3.0]], "label": [0, 1, 0]}
    data = from_huggingface(Dataset.from_dict(rows), by="id", test=Dataset.from_dict(rows))
    assert data.names == (9, 10)
    assert data.client(1)[0].tolist() == [[1], [3]]


def test_rows_that_were_selected_or_shuffled_are_those_that_are_read():
    data = from_huggingface(TABLE.select([5, 4, 0]), by="user", test=TABLE)
    assert data.names == ("a", "b")
    assert data.client(1)[0].tolist() == [[5, 50], [1, 10]]


@pytest.mark.parametrize(
    ("inputs", "target", "expected"),
    [
        ("age", "label", ([4.0], [0])),
        (["height"], "label", ([[40]], [0])),
        (["height", "label"], "age", ([[40, 0]], [4.0])),
        (("age", "height"), "label", (([4.0], [40]), [0])),
        ({"years": "age"}, "label", ({"years": [4.0]}, [0])),
        ({"years": "age", "labels": "label"}, None, ({"years": [4.0], "labels": [0]}, None)),
        ("age", ("label", "height"), ([4.0], ([0], [40]))),
        (None, None, ([[4, 40, 0]], None)),
    ],
)
def test_columns_are_chosen(inputs, target, expected):
    data = from_huggingface(TABLE, by="user", test=TABLE, inputs=inputs, target=target)

    def plain(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: plain(part) for key, part in tree.items()}
        if isinstance(tree, tuple):
            return tuple(map(plain, tree))
        return None if tree is None else tree.tolist()

    assert plain(data.client(2)) == expected


def test_lists_go_by_keyword_and_are_padded():
    data = from_huggingface(tokens(), by="who", test=tokens())
    assert data.names == (3, 7)
    x, y = data.client(1)
    assert x["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert x["mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert y.tolist() == [0, 1]
    tagged = from_huggingface(tokens(), by="who", test=tokens(), inputs="mask", target="input_ids")
    assert tagged.client(0)[1].tolist() == [[9, 9, -100], [1, 2, 3]]
    assert tagged.labels(0) is None


def test_pictures_are_bytes():
    from PIL import Image as Picture

    pictures = [Picture.fromarray(np.full((4, 4), 50 * k, np.uint8)) for k in range(3)]
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog", "owl"]),
            "who": datasets.Value("string"),
        }
    )
    rows = {"image": pictures, "label": [0, 1, 0], "who": ["a", "a", "b"]}
    table = Dataset.from_dict(rows, features=features)
    data: Any = from_huggingface(table, by="who", test=table)
    x, _ = data.client(0)
    assert (x.dtype, tuple(x.shape)) == (torch.uint8, (2, 4, 4))
    assert x[1, 0, 0] == 50
    assert data.classes == 3  # the owl is known by the column's type
    assert data.labels(0).tolist() == [1, 1, 0]


def test_a_share_of_every_client_is_held_out():
    n = 40
    rows = {"user": ["a", "b"] * n, "x": list(range(2 * n)), "label": [0, 1] * n}
    table = Dataset.from_dict(rows)
    data: Any = from_huggingface(table, by="user", test=0.25, inputs="x")
    # 40 · 0.25 = 10 of each
    assert [data.size(k) for k in range(2)] == [30, 30]
    trained = [set(data.client(k)[0].tolist()) for k in range(2)]
    tested = [set(data.client_test(k)[0].tolist()) for k in range(2)]
    assert [len(part) for part in tested] == [10, 10]
    assert trained[0] | tested[0] == set(range(0, 80, 2))
    assert set(data.test()[0].tolist()) == tested[0] | tested[1]
    assert data.labels(0).tolist() == [30, 0]
    again: Any = from_huggingface(table, by="user", test=0.25, inputs="x")
    other: Any = from_huggingface(table, by="user", test=0.25, inputs="x", seed=1)
    assert set(again.client_test(0)[0].tolist()) == tested[0]
    assert set(other.client_test(0)[0].tolist()) != tested[0]


def test_splits_are_found():
    splits = DatasetDict(train=TABLE, test=TABLE.select([0]), validation=TABLE.select([1, 2]))
    data: Any = from_huggingface(splits, by="user", validation=splits["validation"])
    assert data.test()[1].tolist() == [0]
    assert data.validation_set()[1].tolist() == [1, 1]
    with pytest.raises(ValueError, match="has the splits fit: give one of them"):
        from_huggingface(DatasetDict(fit=TABLE), by="user")


def test_a_transform_is_applied_when_a_client_is_read():
    seen: list[int] = []

    def doubled(rows: dict[str, list[Any]]) -> dict[str, Any]:
        seen.append(os.getpid())
        return {"twice": [2 * a for a in rows["age"]], "label": rows["label"]}

    table = TABLE.with_transform(doubled)
    data = from_huggingface(table, by="user", test=TABLE, inputs="twice")
    assert not seen
    assert data.client(1)[0].tolist() == [2, 6, 10]
    assert len(seen) == 1
    assert data.labels(1) is None


def test_a_collate_gets_rows():
    def collate(rows: list[dict[str, Any]]) -> Any:
        return torch.tensor([r["age"] for r in rows]), torch.tensor([r["label"] for r in rows])

    data = from_huggingface(TABLE, by="user", test=TABLE, collate=collate)
    assert data.client(1)[0].tolist() == [1, 3, 5]
    assert data.labels(1) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"by": "usr"}, "no column 'usr' among user, age, height, label: did you mean 'user'?"),
        ({"inputs": "heigth"}, "no column 'heigth' among .*: did you mean 'height'"),
        ({"target": "y"}, "no column 'y' among .*: name one with inputs= or target="),
        ({"test": None}, "give test=: a data set, or a share of each client's rows such as 0.2"),
        ({"test": 1.5}, "test = 1.5: a share must be between 0 and 1"),
        ({"test": 1e-9}, "test = 1e-09 of each client's rows is not one: raise it"),
        ({"test": [1]}, "test must be a datasets.Dataset, got list"),
        ({"dataset": [1]}, "dataset must be a datasets.Dataset, got list"),
        ({"dataset": TABLE.select([])}, "dataset has no rows"),
        (
            {"dataset": datasets.IterableDataset.from_generator(lambda: iter([]))},
            "without streaming",
        ),
    ],
)
def test_mistakes_are_named(change, said):
    with pytest.raises(ValueError, match=said):
        from_huggingface(**({"dataset": TABLE, "by": "user", "test": TABLE} | change))


def test_text_and_empty_values_are_named():
    data = from_huggingface(TABLE, by="label", test=TABLE, inputs="age", target="user")
    with pytest.raises(ValueError, match=r"^client 1: y holds text .*: make numbers of it"):
        data.client(1)
    rows = ROWS | {"user": ["a", None, "b", "c", "d", "e"]}
    with pytest.raises(ValueError, match="column 'user' is empty in 1 rows"):
        from_huggingface(Dataset.from_dict(rows), by="user", test=TABLE)
    rows = ROWS | {"age": [1.0, None, 1.0, 1.0, 1.0, 1.0]}
    data = from_huggingface(Dataset.from_dict(rows), by="user", test=TABLE)
    with pytest.raises(ValueError, match=r"^client 0 \(a\): x has NaN in 1 of 2 samples"):
        data.client(0)


def test_a_table_trains():
    data = from_huggingface(TABLE, by="user", test=TABLE)
    settings = TINY | {"engine": {"name": "local", "workers": 2}}
    (only,) = simulate("digits", settings, model=nn.Linear(2, 3), data=data)
    assert not only.record.rejected
    assert math.isfinite(only.test_loss or math.nan)
    assert only.label_similarity is not None


def test_tables_are_torch_data_sets_too():
    parts = [TABLE.select_columns(["age", "label"]).select([k, k + 1]) for k in (0, 2)]
    x, y = from_datasets(parts, test=parts[0]).client(1)
    assert y is None
    assert x["age"].tolist() == [3, 4]


# Flower


@pytest.fixture
def flower(tmp_path: Path) -> Any:
    package: Any = pytest.importorskip("flwr_datasets")
    folder = tmp_path / "rows"
    folder.mkdir()
    lines = [json.dumps({"pixels": [k / 2, 2.0 * k], "label": k % 3}) for k in range(12)]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "test.jsonl").write_text("\n".join(lines[:5]), encoding="utf-8")

    def make(**partitioners: Any) -> Any:
        return package.FederatedDataset(
            dataset=str(folder),
            partitioners=partitioners,
            shuffle=False,
            cache_dir=str(tmp_path / "cache"),
        )

    return make


def test_a_partition_is_a_client(flower):
    parts = flower(train=4)
    data: Any = from_flower(parts)
    assert data.clients == 4
    for k in range(4):
        rows = parts.load_partition(k)
        x, y = data.client(k)
        assert data.size(k) == len(rows) == 3
        assert x.tolist() == rows["pixels"][:]
        assert y.tolist() == rows["label"][:]
    assert data.test()[1].tolist() == [0, 1, 2, 0, 1]
    assert data.labels(0) is None


def test_partitions_by_an_own_partitioner_train(flower):
    partitioners: Any = pytest.importorskip("flwr_datasets.partitioner")
    by_label = partitioners.NaturalIdPartitioner(partition_by="label")
    data = from_flower(flower(train=by_label))
    assert data.clients == 3
    assert sorted(set(data.client(2)[1].tolist())) == [2]
    settings = TINY | {"engine": {"name": "local", "workers": 2}}
    (only,) = simulate("digits", settings, model=nn.Linear(2, 3), data=data)
    assert not only.record.rejected
    assert math.isfinite(only.test_loss or math.nan)


def test_splits_of_flower_are_chosen(flower):
    both = flower(train=4, test=5)
    with pytest.raises(ValueError, match="the splits train, test are partitioned: give split="):
        from_flower(both)
    data: Any = from_flower(both, split="test", test="train", validation="test")
    assert (data.clients, data.size(0)) == (5, 1)
    assert len(data.test()[1]) == 12
    assert len(data.validation_set()[1]) == 5
    with pytest.raises(ValueError, match="split 'val' is not partitioned, but train, test"):
        from_flower(both, split="val")
    with pytest.raises(ValueError, match="must be a FederatedDataset, got Dataset"):
        from_flower(TABLE)
    with pytest.raises(ValueError, match=r"^client 0: there is no column 'y' among pixels, label"):
        from_flower(flower(train=2), target="y").client(0)
