"""Federations of folders: one file a client."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedglad import simulate
from fedglad.data import folder as folder_module
from fedglad.data import from_folder

FORMATS = ["npz", "safetensors", "jsonl", "csv", "parquet"]


def write(path: Path, columns: dict[str, Any]) -> None:
    """Columns of one number a row, in any of the formats."""
    names, rows = list(columns), list(zip(*columns.values(), strict=True))
    if path.suffix == ".npz":
        arrays: dict[str, Any] = {name: np.array(values) for name, values in columns.items()}
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        save_file({name: torch.tensor(values) for name, values in columns.items()}, path)
    elif path.suffix == ".jsonl":
        text = "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)
        path.write_text(text + "\n\n", encoding="utf-8")
    elif path.suffix == ".csv":
        lines = [",".join(names), *(",".join(map(str, row)) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table(columns), path)


def people(n: int) -> dict[str, Any]:
    ages = [k + 0.5 for k in range(n)]
    return {"age": ages, "height": list(range(n)), "y": [k % 2 for k in range(n)]}


@pytest.fixture(params=FORMATS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for n, name in enumerate(["lyon", "bonn", "test", "validation"], 2):
        write(tmp_path / f"{name}.{request.param}", people(n))
    (tmp_path / "notes.txt").write_text("not a client")
    (tmp_path / f".lock.{request.param}").write_text("not one either")
    (tmp_path / f"older.{request.param}").mkdir()
    return tmp_path


def test_every_file_is_a_client(files: Path):
    data: Any = from_folder(files)
    assert data.names == ("bonn", "lyon")
    assert [data.size(k) for k in range(2)] == [3, 2]
    x, y = data.client(0)
    assert x.tolist() == [[0.5, 0], [1.5, 1], [2.5, 2]]
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert y.tolist() == [0, 1, 0]
    assert len(data.test()[1]) == 4
    assert len(data.validation_set()[1]) == 5
    assert data.labels(0) is None


def test_columns_are_chosen(files: Path):
    x, y = from_folder(files, inputs={"years": "age"}, target="height").client(1)
    assert x["years"].tolist() == [0.5, 1.5]
    assert y.tolist() == [0, 1]
    said = r"\w+\.\w+: there is no column 'yy' among .*: did you mean 'y'\?$"
    with pytest.raises(ValueError, match=said):
        from_folder(files, target="yy").client(0)  # of lines only the number is known at first


def test_a_folder_trains(files: Path):
    settings: dict[str, Any] = {
        "rounds": 1,
        "sampler": {"clients_per_round": 2},
        "engine": {"name": "local", "workers": 2},
    }
    (only,) = simulate("digits", settings, model=nn.Linear(2, 2), data=from_folder(files))
    assert not only.record.rejected
    assert math.isfinite(only.test_loss or math.nan)


def test_only_headers_are_read_before_a_client_is(files: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    for name, kind in list(folder_module.FORMATS.items()):

        class Watched(kind):
            @staticmethod
            def read(path: Path, choice: Any, kind: Any = kind) -> Any:
                read.append(path.name)
                return kind.read(path, choice)

        monkeypatch.setitem(folder_module.FORMATS, name, Watched)
    data = from_folder(files)
    assert [data.size(k) for k in range(2)] == [3, 2]
    assert read == []
    data.client(1)
    assert [name.partition(".")[0] for name in read] == ["lyon"]


@pytest.mark.parametrize("kind", ["npz", "safetensors", "parquet"])
def test_a_size_needs_no_more_than_a_header(kind: str, tmp_path: Path):
    """Of a file whose samples are damaged the size is known all the same."""
    n = 4_000
    values = np.arange(n * 8, dtype=np.float32).reshape(n, 8)
    path = tmp_path / f"a.{kind}"
    if kind == "npz":
        np.savez(path, x=values, y=np.zeros(n, np.int64))
    elif kind == "safetensors":
        save_file({"x": torch.from_numpy(values), "y": torch.zeros(n, dtype=torch.int64)}, path)
    else:
        arrow = pytest.importorskip("pyarrow")
        columns = arrow.table({"x": list(values), "y": np.zeros(n, np.int64)})
        pytest.importorskip("pyarrow.parquet").write_table(columns, path)
    whole = from_folder(tmp_path, test=(values[:1], [0]))
    assert whole.size(0) == n
    assert whole.client(0)[0].tolist() == values.tolist()
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2_000] = b"\xff" * 2_000
    path.write_bytes(content)
    assert from_folder(tmp_path, test=(values[:1], [0])).size(0) == n


def test_arrays_of_more_dimensions(tmp_path: Path):
    for name in ("a", "test"):
        np.savez(tmp_path / name, x=np.zeros((3, 1, 4, 4), np.uint8), y=np.array([0, 1, 2]))
    x, _ = from_folder(tmp_path).client(0)
    assert (x.dtype, tuple(x.shape)) == (torch.uint8, (3, 1, 4, 4))


def test_bfloat16_is_read(tmp_path: Path):
    samples = {"x": torch.ones(2, 3, dtype=torch.bfloat16), "y": torch.tensor([0, 1])}
    save_file(samples, tmp_path / "a.safetensors")
    data = from_folder(tmp_path, test=(np.ones((1, 3)), [0]))
    assert data.client(0)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_sequences_in_files_are_padded(kind: str, tmp_path: Path):
    columns = {"ids": [[5, 6, 7], [8]], "tags": [[1, 0, 1], [1]], "matrix": [[[1, 2]], [[3, 4]]]}
    write(tmp_path / f"a.{kind}", columns)
    data = from_folder(
        tmp_path, test=(np.ones((1, 3)), [0]), inputs=["ids", "matrix"], target="tags"
    )
    x, y = data.client(0)
    assert x["ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert x["matrix"].tolist() == [[[1, 2]], [[3, 4]]]
    assert y.tolist() == [[1, 0, 1], [1, -100, -100]]


def test_the_test_set_may_be_given(files: Path):
    kind = next(files.glob("bonn.*")).suffix
    other = files / "elsewhere"
    other.mkdir()
    shutil.move(files / f"test{kind}", other / f"later{kind}")
    with pytest.raises(ValueError, match=r"has no file test\.\*: give test=, a file or \(x, y\)"):
        from_folder(files)
    assert len(from_folder(files, test=other / f"later{kind}").test()[1]) == 4
    assert len(from_folder(files, test=(np.ones((7, 2)), [0] * 7)).test()[1]) == 7


def test_folders_that_are_no_federation_are_refused(tmp_path: Path):
    test = np.ones((1, 2)), [0]
    with pytest.raises(ValueError, match="is not a folder"):
        from_folder(tmp_path / "none", test=test)
    with pytest.raises(ValueError, match=r"has no file of a client: \*\.parquet, \*\.npz"):
        from_folder(tmp_path, test=test)
    write(tmp_path / "a.csv", people(2))
    with pytest.raises(ValueError, match=r"test = 'b.txt': must be one of \*\.parquet"):
        from_folder(tmp_path, test="b.txt")
    write(tmp_path / "a.npz", people(2))
    with pytest.raises(ValueError, match="two clients have the name 'a'"):
        from_folder(tmp_path, test=test)
    write(tmp_path / "test.csv", people(2))
    write(tmp_path / "test.npz", people(2))
    with pytest.raises(ValueError, match=r"has 2 files test\.\*: give test="):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "city,y\nBonn,1\n", "column 'city' holds 'Bonn': make a number of it"),
        ("a.csv", "age,y\n,1\n2,1\n", "column 'age' holds '': make a number of it"),
        ("a.csv", "age,y\n1,1,1\n", "row 1 has 3 cells, but there are 2 names"),
        ("a.csv", "age,z\n1,1\n", "there is no column 'y' among age, z"),
        ("a.csv", "age,y\n", "no samples: leave it out"),
        ("a.csv", "y\n1\n", "no column is left for inputs among y"),
        ("a.jsonl", "", "no samples: leave it out"),
        ("a.jsonl", "[1, 2]\n", "line 1 is a list, not an object"),
        ("a.jsonl", '{"x": 1, "y": 0}\n{"x": 1}\n', "line 2 has other keys than the first line"),
        ("a.jsonl", '{"x": 1, "y": 0}\n{"x": null, "y": 1}\n', "1 of 2 values are null"),
        ("a.jsonl", '{"x": 1, "y": "cat"}\n', "y holds text"),
        ("a.jsonl", '{"x": [1, "b"], "y": 1}\n', "holds text"),
        ("a.jsonl", "{nonsense\n", "a.jsonl: Expecting property name"),
        ("a.npz", "nonsense", "a.npz: File is not a zip file"),
        ("a.safetensors", "nonsense", r"a\.safetensors: Error while deserializing header"),
    ],
)
def test_files_that_are_no_clients_are_refused(name: str, content: str, said: str, tmp_path: Path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=said) as error:
        from_folder(tmp_path, test=(np.ones((1, 2)), [0])).client(0)
    assert "\n" not in str(error.value)
    assert "a" in str(error.value)


def test_a_damaged_parquet_file_is_named(tmp_path: Path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing PAR1")
    with pytest.raises(ValueError, match=r"^a\.parquet"):
        from_folder(tmp_path, test=(np.ones((1, 2)), [0]))


def test_empty_cells_of_parquet_are_named(tmp_path: Path):
    write(tmp_path / "a.parquet", {"x": [1.0, None], "y": [0, 1]})
    data = from_folder(tmp_path, test=(np.ones((1, 1)), [0]))
    with pytest.raises(
        ValueError, match=r"^client 0 \(a\): a.parquet: column 'x' is empty in 1 rows"
    ):
        data.client(0)


def test_pickles_in_npz_files_are_not_opened(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x=np.array([{}, {}], object), y=np.array([0, 1]))
    data = from_folder(tmp_path, test=(np.ones((1, 1)), [0]))
    with pytest.raises(ValueError, match=r"^client 0 \(a\): a.npz: Object arrays cannot be loaded"):
        data.client(0)


def test_without_pyarrow_parquet_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a.parquet").write_bytes(b"")

    def without(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="pyarrow")

    monkeypatch.setattr(folder_module, "import_module", without)
    said = r"a\.parquet needs the package pyarrow: pip install 'fedglad\[data\]'"
    with pytest.raises(ImportError, match=said):
        from_folder(tmp_path, test=(np.ones((1, 1)), [0]))


def test_a_file_that_is_gone_is_an_error_of_the_disk(tmp_path: Path):
    write(tmp_path / "a.jsonl", people(2))
    data = from_folder(tmp_path, test=(np.ones((1, 2)), [0]))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(FileNotFoundError):
        data.client(0)
