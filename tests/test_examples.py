"""What users copy must run: the examples as programs, the code on the pages as it is printed."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fedglad
from fedglad import Glad
from fedglad.cli import app
from fedglad.config import load
from fedglad.data import Digits
from fedglad.runs import execute

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def run(script: str | Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=120
    )


@pytest.mark.slow
def test_demo_tells_and_draws_what_happened_and_finds_its_runs_again(tmp_path: Path):
    cwd = tmp_path / "my folder"
    cwd.mkdir()
    call = ["--seeds", "3", "--rounds", "6", "--out", "plots [1]/a"]
    done = run("examples/demo.py", *call, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert (cwd / "plots [1]/a/digits.png").read_bytes().startswith(b"\x89PNG")
    said = " ".join(done.stdout.split())
    for part in (
        r"6/6 seed=\d adapter\.name=\w+ accuracy \d+\.\d\d %",
        r"adapter\.name=glad 3 \d+\.\d\d ± \d+\.\d\d \d+\.\d\d [+-]\d+\.\d\d \[",
        r"Round 4 was forced: 5 clients, \d+ % of whose images are a \d\.",
        r"FedAvg( \d+\.\d %){3} FedAvg, averaged( \d+\.\d %){3} FedAvg \+ FedGLAD( \d+\.\d %){3}",
        r"FedAvg \+ FedGLAD, averaged( \d+\.\d %){3}",
        r"agreed (no )?more than usual: GSI \d\.\d\d, its running mean \d\.\d\d\.",
        r"FedGLAD multiplied the step by \d\.\d\d",
        r"the last 10 rounds: - FedGLAD over FedAvg: [+-]\d+\.\d points \(95 %: .*, 3 seeds\), \w+",
        r"- FedAvg's average over its newest model: [+-]\d+\.\d points \(95 %: .*, 3 seeds\), \w+",
        r"Plot: plots \[1\]/a/digits\.png",
    ):
        assert re.search(part, said), part
    assert "\x1b" not in done.stdout  # no colours, no cursor movements outside a terminal

    again = run("examples/demo.py", *call, cwd=cwd)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("6 of 6 runs are in plots [1]/a/demo already")
    assert again.stdout.partition("\n\n")[2] == done.stdout.partition("\n\n")[2]


@pytest.mark.slow
def test_demo_claims_nothing_from_one_seed(tmp_path: Path):
    done = run("examples/demo.py", "--seeds", "1", "--rounds", "6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count("too few seeds") == 4
    assert (tmp_path / "out/digits.png").exists()


def test_demo_refuses_what_it_cannot_run(tmp_path: Path):
    done = run("examples/demo.py", "--rounds", "5", cwd=tmp_path)
    assert done.returncode == 2
    assert "--rounds of at least 6" in done.stderr


def test_an_own_loop_runs(tmp_path: Path):
    done = run("examples/own_loop.py", "--rounds", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    assert re.fullmatch(r" +4( +\d+\.\d){2}( +\d\.\d\d){2}", last)


@pytest.mark.parametrize("block", blocks("docs/numpy.md"), ids=["numpy", "nested"])
def test_code_on_the_numpy_page_learns(block: str):
    scope: dict[str, Any] = {}
    exec(block, scope)
    losses, record = scope["losses"], scope["record"]
    assert losses[-1] < 0.5 * losses[0]
    assert not record.rejected


@pytest.mark.parametrize("block", blocks("docs/average.md"), ids=["python", "numpy", "drift"])
def test_code_on_the_average_page_runs(block: str):
    scope: dict[str, Any] = {}
    exec(block, scope)
    server = scope["server"]
    assert server.averaged.keys() == server.state.keys()


OWN_DATA = ["arrays", "datasets", "huggingface", "flower", "folder"]


@pytest.mark.parametrize("block", blocks("docs/data.md")[1:], ids=OWN_DATA)
def test_code_on_the_data_page_makes_federations(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for package in re.findall(r"^from (datasets|flwr_datasets) ", block, re.M):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(block, scope)
    data = scope["data"]
    assert data.clients >= 2
    for k in range(data.clients):
        x, y = data.client(k)
        assert len(x) == len(y) == data.size(k)
    assert len(data.test()[1])
    assert len(scope.get("rounds", "··")) == 2


def test_code_on_the_run_page_runs(capsys: pytest.CaptureFixture[str]):
    *_, block = blocks("docs/run.md")
    exec(block, {})
    assert re.fullmatch(r"(\d 0\.\d+ \d\.\d+\n){3}", capsys.readouterr().out)


def test_a_model_is_taken_along_as_the_run_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/run.md").read_text("utf-8")
    (call,) = re.findall(r"^    fedglad (run .*--out runs/mine)$", page, re.M)[-1:]
    exports = re.findall(r"^    fedglad (export runs/mine .*?)(?: +#.*)?$", page, re.M)
    assert len(exports) == 2
    tiny = ["--set", "rounds=2", "--set", "client.epochs=1", "--set", "engine.name=serial"]
    for args in ([*call.split(), *tiny], *(line.split() for line in exports)):
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 0, done.output
    scope: dict[str, Any] = {}
    exec(blocks("docs/run.md")[0], scope)
    assert not scope["model"].training
    kept = torch.load("mine.pt", weights_only=True)
    assert kept.keys() == scope["model"].state_dict().keys()


def test_code_on_the_python_page_runs_as_one_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks("docs/python.md"):
        quick = '"client.epochs": 1, "engine.name": "serial"'  # no processes for so little
        exec(block.replace('"client.epochs": 1', quick), scope)
    said = capsys.readouterr().out
    assert re.match(
        r"<run digits; 6 of 6 rounds; accuracy \d.* %; averaged .* %; runs/mine>\n", said
    )
    assert "2 False\n4 True\n" in said
    assert scope["page"] == Path("runs/mine/report.html")
    assert torch.load("mine.pt", weights_only=True).keys() == scope["state"].keys()
    own = (tmp_path / "runs/own/config.toml").read_text("utf-8")
    assert 'name = "__main__:Damped"' in own
    assert own.count("from_python = ") == 3  # the model, the data and the rule
    assert scope["again"].finished
    assert len(scope["norms"]) == 4
    assert scope["table"]["adapter.name"].value_counts().to_dict() == {"none": 2, "glad": 2}
    assert scope["curves"].shape == (6, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.pt", "runs"]


def test_what_the_readme_runs_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in blocks("README.md") if "fedglad.run(" in block)
    assert '"digits", ' in block
    tiny = '"digits", {"rounds": 2, "engine.name": "serial"}, '
    scope: dict[str, Any] = {
        "fedglad": fedglad,
        "Mine": Glad,
        "module": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
        "federation": Digits(clients=12).load_federation(),
    }
    exec(block.replace('"digits", ', tiny), scope)
    assert len(scope["run"].rounds) == 2
    assert (tmp_path / "runs/mine/summary.json").is_file()


NOTEBOOK = ROOT / "examples/research.ipynb"


def cells() -> list[str]:
    parts = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return ["".join(part["source"]) for part in parts if part["cell_type"] == "code"]


def test_the_notebook_is_kept_without_outputs():
    parts = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    assert all(not part.get("outputs") and not part.get("execution_count") for part in parts)
    assert NOTEBOOK.stat().st_size < 20_000


def test_the_cells_of_the_notebook_are_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same code without a kernel, with fewer rounds and seeds."""
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    text = "\n".join(cells())
    tiny = '"rounds": 2, "client.epochs": 1, "engine.name": "serial"'
    for long, short in {
        '"rounds": 10, "client.epochs": 2': tiny,
        "(1, 2, 3)": "(1, 2)",
    }.items():
        assert long in text
        text = text.replace(long, short)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(text, scope)
    assert len(scope["runs"]) == 6
    assert scope["curves"].columns.tolist() == ["__main__:Damped", "glad", "none"]
    table = [row for row in scope["rows"] if "averaged" not in row[0]]
    assert [row[0] for row in table] == [
        "adapter.name=none",
        "adapter.name=glad",
        "adapter.name=__main__:Damped",
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # Jupyter's
def test_the_notebook_runs_in_a_kernel(tmp_path: Path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [part for cell in book.cells for part in cell.get("outputs", [])]
    pages = [part["data"].get("text/html", "") for part in outputs if "data" in part]
    assert any("<progress value=" in page for page in pages)
    assert any("<th>run</th><td>digits</td>" in page for page in pages)
    assert any("95 % interval" in page and "__main__:Damped" in page for page in pages)
    assert sum("image/png" in part.get("data", {}) for part in outputs) == 2
    assert not [part for part in outputs if part["output_type"] == "stream"]
    assert len([*(tmp_path / "runs").iterdir()]) == 9


@pytest.mark.slow
def test_code_on_the_sweep_page_runs_and_finds_its_runs_again(tmp_path: Path):
    *_, block, on_ray = blocks("docs/sweep.md")
    script = tmp_path / "many.py"
    script.write_text(block, encoding="utf-8")
    for end in ("finished", "kept"):
        done = run(script, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f" {end} ") == 6
        assert "label='adapter.name=glad'" in done.stdout
    script.write_text(on_ray, encoding="utf-8")
    done = run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" finished ") == 2


@pytest.mark.slow
def test_own_model_and_data_on_the_page_on_running_can_be_run(tmp_path: Path):
    (mine,) = (block for block in blocks("docs/run.md") if "def hospitals" in block)
    (tmp_path / "mine.py").write_text(mine, encoding="utf-8")
    page = (ROOT / "docs/run.md").read_text("utf-8")
    (call,) = re.findall(r"^    fedglad (run .*mine:hospitals.*)$", page, re.M)
    command = [sys.executable, "-m", "fedglad", *call.split(), "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"final (\d+\.\d+) %", done.stdout)
    assert found
    assert float(found[1]) > 80  # it learns: a third would be chance
    config = (tmp_path / "run/config.toml").read_text("utf-8")
    assert 'name = "mine:hospitals"' in config
    assert "width = 16" in config


def test_rounds_to_a_target_as_the_page_on_running_has_it(tmp_path: Path):
    (block,) = (block for block in blocks("docs/run.md") if "rounds_to" in block)
    settings = {"rounds": 2, "client.epochs": 1, "engine.name": "serial"}
    execute(*load("digits", settings), out=tmp_path / "run")
    scope: dict[str, Any] = {"folder": tmp_path / "run"}
    exec(block, scope)
    assert scope["run"].summary["update_bytes"]["down"] > 0


def test_code_on_the_page_on_partitions_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    block, _ = blocks("docs/partitions.md")
    scope: dict[str, Any] = {}
    exec(block, scope)
    assert scope["counts"].shape == (20, 10)
    assert (tmp_path / "clients.png").exists()


@pytest.mark.slow
def test_the_own_partition_on_the_page_can_be_drawn_and_run(tmp_path: Path):
    _, mine = blocks("docs/partitions.md")
    (tmp_path / "mine.py").write_text(mine, encoding="utf-8")
    page = (ROOT / "docs/partitions.md").read_text("utf-8")
    calls = re.findall(r"^    fedglad (.*mine:Hub.*)$", page, re.M)
    assert len(calls) == 2
    for call in calls:
        command = [sys.executable, "-m", "fedglad", *call.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    (config,) = tmp_path.glob("runs/*/config.toml")
    assert 'partition = "mine:Hub"' in config.read_text("utf-8")
    assert 'partition_settings = {"share" = 0.6}' in config.read_text("utf-8")


def test_the_picture_on_the_page_on_partitions_is_what_is_drawn():
    from fedglad.data import picture
    from fedglad.data.digits import Digits

    page = (ROOT / "docs/partitions.md").read_text("utf-8")
    settings = Digits(clients=12, alpha=1.0)
    counts = picture.class_counts(settings.load_federation())
    drawn = picture.text(counts, title=settings.words(10)).plain
    assert "\n".join(f"    {line}".rstrip() for line in drawn.splitlines()) in page


@pytest.mark.parametrize("k", range(9))
def test_what_users_bring_trains_as_it_is_printed(k: int, tmp_path: Path, monkeypatch: Any):
    pytest.importorskip("peft")
    found = blocks("docs/own.md")
    assert len(found) == 9
    assert len([line for line in found[k].splitlines() if line.strip()]) <= 20
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    names: dict[str, Any] = {"__name__": "own"}
    exec(found[k], names)
    rounds = names["rounds"]
    assert all(round.record.stepped and not round.record.rejected for round in rounds)
    assert rounds[-1].test_loss < rounds[0].test_loss
    assert math.isfinite(rounds[-1].scored())
    assert list(tmp_path.iterdir()) == []


def tomls(page: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)


def test_rates_over_the_rounds_as_the_page_on_running_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (block,) = (block for block in tomls("docs/run.md") if "rounds_schedule" in block)
    path = tmp_path / "rates.toml"
    path.write_text(f"rounds = 40\n{block}", encoding="utf-8")
    plan = load(path)[1].plan()
    assert plan.client.of_round(20).lr == pytest.approx(0.025)  # half-way down the cosine
    assert plan.optimizer.rate(20) == pytest.approx(0.25)
    (mine,) = (block for block in blocks("docs/run.md") if "class Inverse" in block)
    (tmp_path / "mine_rates.py").write_text(mine, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    name = {"server.schedule": "mine_rates:Inverse", "client.rounds_schedule": "mine_rates:Inverse"}
    plan = load("digits", name)[1].plan()
    assert plan.optimizer.rate(3) == 0.5
    assert plan.client.of_round(3).lr == plan.client.lr / 2


def test_fewer_bytes_as_the_page_on_running_has_them(tmp_path: Path):
    page = (ROOT / "docs/run.md").read_text("utf-8").split("## Fewer bytes")[1]
    calls = re.findall(r"^fedglad (run --set transform.*)$", page.split("\n## ")[0], re.M)
    tiny = ["--set", "rounds=1", "--set", "client.epochs=1", "--set", "engine.name=serial"]
    for k, call in enumerate(calls):
        done = CliRunner().invoke(app, [*call.split(), *tiny, "--out", str(tmp_path / str(k))])
        assert done.exit_code == 0, done.output
    assert len(calls) == 2


def test_the_private_run_on_the_page_on_privacy(tmp_path: Path):
    (block,) = tomls("docs/privacy.md")
    path = tmp_path / "private.toml"
    path.write_text(block, encoding="utf-8")
    config = load(path)[1]
    assert config.sections["privacy"].deviation(100) == pytest.approx(0.008)
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    run = execute(*load(path, {"rounds": 2, "engine.name": "serial"}), out=tmp_path / "run")
    assert [record["status"] for record in run.rounds()] == ["stepped"] * 2
    price, loop = (block for block in blocks("docs/privacy.md") if "Central" in block)
    exec(price, {})
    scope: dict[str, Any] = {}
    exec(loop, scope)
    assert scope["record"].epsilon == scope["server"].epsilon > 0
