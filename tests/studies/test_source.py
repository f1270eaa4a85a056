"""Every number that was typed from the paper, against its LaTeX source."""

import os
import re
from pathlib import Path

import pytest

from fedglad.config.presets import PRESETS
from fedglad.data.picture import class_counts
from fedglad.data.sources import DataError
from fedglad.data.store import entry_of
from fedglad.studies.paper import settings
from fedglad.studies.paper.experiments import ENDING, EXPERIMENTS
from fedglad.studies.paper.settings import PAPER, TABLES, Value

ROOT = Path(__file__).parents[2]
NAMES = {data.title: name for name, data in settings.DATA.items()}


def beside() -> Path:
    """The paper lies in a folder beside the data sets."""
    data = os.environ.get("FEDGLAD_DATA")
    folder = Path(data).parent if data else ROOT.parent / "shared"
    return folder / "paper" / "fedglad.tex"


@pytest.fixture(scope="module")
def source() -> str:
    if not beside().is_file():
        pytest.skip("the paper's LaTeX source is not here")
    return beside().read_text("utf-8")


def rows(source: str, near: str) -> list[list[str]]:
    """The rows of the first tabular after the text, without LaTeX's commands."""
    source = re.sub(r"\\begin\{tabular\}\[c\].*?\\end\{tabular\}", "", source)
    start = source.index(r"\begin{tabular}", source.index(near))
    start = source.index("\n", start)
    body = source[start : source.index(r"\end{tabular}", start)]
    found: list[list[str]] = []
    for line in body.split(r"\\"):
        line = re.sub(r"\\(cmidrule(\(lr\))?\{[^}]*\}|midrule|toprule|bottomrule)", "", line)
        line = re.sub(r"\\multirow\{[^}]*\}\{\*\}\{([^}]*)\}", r"\1", line)
        line = re.sub(r"\\(textbf|small)\{([^}]*)\}", r"\2", line)
        line = re.sub(r"\\phantom\{0\}|\\scriptsize|[{}$()~]|\\text", "", line)
        cells = [cell.replace(r"\pm", "±").strip() for cell in line.split("&")]
        if len(cells) > 1:
            found.append(cells)
    return found


def label(name: str) -> str:
    """Of a table in the LaTeX source."""
    return rf"\label{{{PAPER['tables'][name]['label']}}}"


def values(cells: list[str]) -> list[Value]:
    """Cells like "35.30 ± 1.62"."""
    found: list[Value] = []
    for cell in cells:
        mean, _, std = cell.replace(" ", "").partition("±")
        found.append(Value(float(mean), float(std) if std else None))
    return found


def by_method(found: list[list[str]], column: int = 0) -> list[tuple[str, str, bool, list[str]]]:
    """(what stands before, method, with FedGLAD, the rest); a FedGLAD row belongs to the last."""
    before, method, told = "", "", list[tuple[str, str, bool, list[str]]]()
    for cells in found:
        before = (cells[0] or before) if column else ""
        glad = cells[column] == "+ FedGLAD"
        method = method if glad else cells[column]
        told.append((before, method, glad, cells[column + 1 :]))
    return told


@pytest.mark.parametrize("alpha", settings.ALPHAS)
def test_the_main_tables(source: str, alpha: float):
    name = f"main{ENDING[alpha]}"
    table = TABLES[name]
    found = by_method(rows(source, label(name))[1:])
    assert len(found) == 8
    for _, method, glad, cells in found:
        own = [table[data, method, glad] for data in settings.DATA]
        assert own == values(cells)
    assert len(table) == 32


@pytest.mark.parametrize("alpha", settings.ALPHAS)
def test_the_tables_by_seed(source: str, alpha: float):
    name = f"seeds{ENDING[alpha]}"
    table = TABLES[name]
    found = by_method(rows(source, label(name))[2:], column=1)
    assert len(found) == 16
    for title, method, glad, cells in found:
        own = [table[NAMES[title], method, glad, seed] for seed in (1, 2, 3)]
        assert own == values(cells)


@pytest.mark.parametrize(
    ("name", "columns"), [("ratios", [5, 10, 20]), ("strategies", ["md", "adafl"])]
)
def test_the_tables_of_samplers(source: str, name: str, columns: list[int] | list[str]):
    table = TABLES[name]
    found = by_method(rows(source, label(name))[2:], column=1)
    assert len(found) == 8
    for title, method, glad, cells in found:
        assert [table[NAMES[title], method, glad, c] for c in columns] == values(cells)


def test_the_other_tables(source: str):
    (found,) = rows(source, label("centralised"))[1:]
    assert [TABLES["centralised"][(name,)] for name in settings.DATA] == values(found)

    found = by_method(rows(source, label("scaffold"))[2:])
    columns = [(name, alpha) for name in ("20news", "agnews", "mnist") for alpha in (0.1, 1.0)]
    for _, method, glad, cells in found:
        assert [TABLES["scaffold"][c[0], method, glad, c[1]] for c in columns] == values(cells)
    assert len(found) == 2

    found = by_method(rows(source, label("bilstm"))[1:])
    for _, method, glad, cells in found:
        own = [TABLES["bilstm"][name, method, glad] for name in ("20news", "agnews")]
        assert own == values(cells[1:])
    assert len(found) == 5

    found = by_method(rows(source, label("epochs"))[2:])
    columns = [(name, epochs) for name in ("cifar10", "mnist") for epochs in (10, 20)]
    for _, method, glad, cells in found:
        assert [TABLES["epochs"][c[0], method, glad, c[1]] for c in columns] == values(cells)
    assert len(found) == 4


def test_the_norm_ratios(source: str):
    found = rows(source, r"\caption{The averaged ratio values")[2:]
    title = ""
    for first, alpha, *cells in found:
        title = first or title
        own = [TABLES["norm-ratio"][NAMES[title], float(alpha), e] for e in (1, 3, 5)]
        assert own == values(cells)
    assert len(found) == 4
    assert f"two variables is {settings.SIMILARITY.mean}," in source


def test_the_tables_have_the_numbers_that_the_paper_gives_them(source: str):
    """LaTeX counts captions; each table's label is on the line of its caption or below it."""
    labels = re.findall(r"\\label\{(tab: [^}]*)\}", source)
    tables = PAPER["tables"].values()
    assert {table["label"]: table["number"] for table in tables} == {
        label: labels.index(label) + 1 for label in (table["label"] for table in tables)
    }
    numbered = {"best mu": 13, "local training": 14, "baseline lr": 15, "best server lr": 16}
    for start, number in numbered.items():
        assert labels[number - 1].startswith(f"tab: {start}")
    assert labels[16] == "tab: details of bilstm"


def test_the_data_sets_and_local_training(source: str):
    for title, train, test, classes, model, rounds in rows(
        source, r"\label{tab: datasets and models}"
    )[1:]:
        data = settings.DATA[NAMES[title]]
        told = (f"{data.train:,}", f"{data.test:,}", str(data.classes), str(data.rounds))
        assert (*told, data.model) == (train, test, classes, rounds, model)
    local = rows(source, r"\label{tab: local training hyper-parameters}")[1:]
    for title, lr, batch, optimizer, epochs in local:
        data = settings.DATA[NAMES[title]]
        own = (data.lr, data.batch_size, data.optimizer, data.epochs)
        assert own == (float(lr), int(batch), optimizer, int(epochs))
    assert len(local) == 4


def test_the_rates_and_mu(source: str):
    settings_ = [(name, alpha) for name in settings.DATA for alpha in settings.ALPHAS]
    rates = rows(source, r"\label{tab: best server lr in our experiments}")[2:]
    for method, *cells in rates:
        own = [settings.SERVER_LR[method][name][alpha] for name, alpha in settings_]
        assert own == [float(cell) for cell in cells]
    assert [row[0] for row in rates] == list(settings.SERVER_LR)
    ((_, *cells),) = rows(source, r"\label{tab: best mu}")[2:]
    assert [settings.MU[name][alpha] for name, alpha in settings_] == [float(c) for c in cells]
    assert r"$\mu$ from $\{1.0,0.1,0.01,0.001\}$" in source
    assert settings.MU_GRID == (1.0, 0.1, 0.01, 0.001)
    assert r"recommended grid is $\{0.01,0.02,\cdots,0.05\}$" in source
    assert r"we tune it from $\{1,3,5,10\}$" in source
    assert settings.EPOCHS_GRID == (1, 3, 5, 10)


def test_the_rates_as_they_are_printed():
    """Table 16 and 17 once more: the source of the paper is not everywhere."""
    printed = {
        "FedAvg": (0.5, 0.5, 1.0, 1.0, 7.0, 6.0, 1.0, 1.0),
        "FedAvgM": (0.2, 0.1, 0.5, 0.5, 2.0, 2.0, 0.5, 0.5),
        "FedAdam": (5e-3, 5e-3, 1e-2, 1e-2, 3e-4, 3e-4, 2e-4, 1e-4),
    }
    printed["FedProx"] = printed["SCAFFOLD"] = printed["FedAvg"]
    settings_ = [(name, alpha) for name in settings.DATA for alpha in settings.ALPHAS]
    for method, row in printed.items():
        assert tuple(settings.SERVER_LR[method][name][alpha] for name, alpha in settings_) == row
    assert settings.SERVER_LR.keys() == printed.keys()
    assert settings.BILSTM_LR == {
        "20news": {"FedAvg": 1.0, "FedAvgM": 0.1},
        "agnews": {"FedAvg": 0.5, "FedAvgM": 0.05},
    }


def expanded(text: str) -> list[float]:
    """0.5,1.0,2.0,…,10.0: the dots go on with the step before them."""
    found: list[float] = []
    parts = [part for part in text.replace("\\", "").replace(" ", "").split(",") if part]
    for k, part in enumerate(parts):
        if part == "cdots":
            step, last = found[-1] - found[-2], float(parts[k + 1])
            while found[-1] + 1.5 * step < last:
                found.append(found[-1] + step)
        else:
            found.append(float(part))
    return found


def test_the_grids(source: str):
    found = rows(source, r"\label{tab: baseline lr search grids}")[1:]
    methods = ""
    for first, sets, grid in found:
        methods, grid = first or methods, grid.strip("\\")
        kind = "images" if "MNIST" in sets else "texts"
        for method in re.findall(r"[A-Za-z]+", methods):
            own = settings.GRIDS[settings.METHODS[method]["server.name"]][kind]
            if (method, kind) == ("FedAdam", "texts"):
                assert grid.endswith("5e-5")  # the misprint
                grid = grid[: -len("5e-5")] + "5e-4"
            assert own == pytest.approx(expanded(grid))
    assert len(found) == 6
    for method, by_data in settings.SERVER_LR.items():
        for name, rates in by_data.items():
            kind = "images" if settings.DATA[name].images else "texts"
            server = settings.METHODS[method]["server.name"]
            assert set(rates.values()) <= set(settings.GRIDS[server][kind])


def test_the_bilstm(source: str):
    found = rows(source, r"\label{tab: details of bilstm}")[2:]
    title, local = "", list[str]()
    for first, optimizer, lr, batch, epochs, method, rate, rounds, gamma in found:
        title = first or title
        local = [optimizer, lr, batch, epochs] if optimizer else local
        own = settings.BILSTM[NAMES[title]]
        client = [own["client"][key] for key in ("optimizer", "lr", "batch_size", "epochs")]
        assert [client[0].title(), *map(str, client[1:])] == local
        told = (settings.BILSTM_LR[NAMES[title]][method], own["rounds"], own["gamma"])
        assert told == (float(rate), int(rounds), float(gamma))
    assert len(found) == 4


@pytest.mark.parametrize("name", [name for name in settings.DATA if name in PRESETS])
def test_the_presets_agree_with_the_appendix(name: str):
    preset, data = PRESETS[name], settings.DATA[name]
    client, tree = preset.tree["client"], preset.tree
    assert (client["lr"], client["batch_size"]) == (data.lr, data.batch_size)
    optimizer = {"sgdm": "SGDM", "adamw": "Adam"}[client["optimizer"]]  # the same without decay
    assert (client["epochs"], optimizer) == (data.epochs, data.optimizer)
    assert not client.get("weight_decay", 0)
    assert (tree["rounds"], tree["data"]["clients"]) == (data.rounds, settings.CLIENTS)
    assert tree["sampler"]["clients_per_round"] == settings.COHORT
    for method in ("FedAvg", "FedAvgM", "FedAdam"):
        server = settings.METHODS[method]["server.name"]
        assert preset.server_lr[server] == settings.SERVER_LR[method][name]


@pytest.mark.parametrize("name", settings.BILSTM)
def test_the_bilstms_presets_agree_with_the_appendix(name: str):
    preset, own = PRESETS[f"{name}-bilstm"], settings.BILSTM[name]
    client, tree = preset.tree["client"], preset.tree
    assert (client["lr"], client["batch_size"], client["epochs"]) == (0.001, 32, 1)
    assert (client["optimizer"], client.get("clip_norm", 0.0)) == tuple(
        own["client"][key] for key in ("optimizer", "clip_norm")
    )
    assert (tree["rounds"], tree["data"]["clients"]) == (own["rounds"], settings.CLIENTS)
    assert tree.get("adapter", {"gamma": settings.GAMMA})["gamma"] == own["gamma"]
    for method, rate in settings.BILSTM_LR[name].items():
        server = settings.METHODS[method]["server.name"]
        assert set(preset.server_lr[server].values()) == {rate}


def test_the_bad_cohort_holds_almost_only_one_digit():
    try:
        here = entry_of("mnist")
    except DataError:
        here = None
    if here is None:
        pytest.skip("MNIST is not here: fedglad data get mnist")
    config = EXPERIMENTS["bad-round"].cells[0].config(1)
    counts = class_counts(config.sections["data"].load_federation())
    shares = counts / counts.sum(axis=1, keepdims=True)
    best = {c: sorted(shares[:, c].argsort()[-settings.COHORT :].tolist()) for c in range(10)}
    merged = {c: counts[ids, c].sum() / counts[ids].sum() for c, ids in best.items()}
    assert max(merged, key=lambda c: merged[c]) == 0
    assert tuple(best[0]) == settings.BAD_COHORT
    assert merged[0] == pytest.approx(0.9455, abs=5e-5)


@pytest.mark.parametrize(
    ("data", "server", "count"),
    [("mnist", "sgd", 11), ("20news", "momentum", 11), ("agnews-76k", "adam", 10)],
)
def test_a_configuration_has_the_grid_of_its_method(data: str, server: str, count: int):
    found = settings.grid("server.lr", {"data": {"name": data}, "server": {"name": server}})
    assert len(found) == count
    if server == "adam":
        assert max(found) == 5e-4  # of texts
    with pytest.raises(ValueError, match=r"the paper has no grid for server.name = 'yogi'"):
        settings.grid("server.lr", {"data": {"name": data}, "server": {"name": "yogi"}})
