"""The experiments as data: their cells, their configurations, and what this version lacks."""

from dataclasses import replace

import pytest

from fedglad.config import presets
from fedglad.config.presets import Preset
from fedglad.config.schema import load
from fedglad.studies.paper.cells import ABSENT, Experiment, PaperError
from fedglad.studies.paper.experiments import EXPERIMENTS, find

every_experiment = pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)


@every_experiment
def test_cells_have_labels_of_their_own_and_a_baseline_that_is_there(experiment: Experiment):
    labels = [cell.label for cell in experiment.cells]
    assert len(set(labels)) == len(labels)
    assert {cell.baseline for cell in experiment.cells} <= {None, *labels}


@every_experiment
def test_cells_that_this_version_has_are_valid_configurations(experiment: Experiment):
    for cell in experiment.cells:
        if not cell.absent:
            config = cell.config(seed=3)
            assert (config.seed, config.rounds) == (3, cell.rounds)
            assert config.to_dict()["data"]["name"] == cell.data


@pytest.mark.parametrize(
    ("experiment", "label", "plain"),
    [
        ("main", "MNIST FedAvg", {"adapter.name": "none"}),
        ("main", "MNIST FedAvg + FedGLAD", {}),
        (
            "main",
            "MNIST FedProx",
            {"adapter.name": "none", "client.name": "fedprox", "client.mu": 1.0},
        ),
        ("main", "MNIST FedAvgM + FedGLAD", {"server.name": "momentum"}),
        ("main", "MNIST FedAdam", {"adapter.name": "none", "server.name": "adam"}),
        ("main-alpha1", "MNIST FedAvg + FedGLAD", {"data.alpha": 1.0}),
        ("controls", "MNIST FedAvg, server rate 0.8", {"adapter.name": "none", "server.lr": 0.8}),
        ("controls", "MNIST FedAvg + pooled", {"adapter.name": "pooled"}),
        ("gsi-groups", "MNIST FedAvg", {"adapter.name": "none"}),
        (
            "draws",
            "MNIST FedAvg + FedGLAD",
            {"data.partition": "fednlp", "sampler.name": "fedml"},
        ),
    ],
)
def test_a_cell_is_the_run_that_a_plain_sweep_makes(
    experiment: str, label: str, plain: dict[str, object]
):
    assert find(experiment).cell(label).config(1).hash() == load("mnist", plain)[1].hash()


def test_experiments_share_runs():
    gamma, groups, main = (find(name) for name in ("gamma", "groups", "main"))
    plain = main.cell("CIFAR-10 FedAvg").config(1).hash()
    glad = main.cell("CIFAR-10 FedAvg + FedGLAD").config(1).hash()
    assert gamma.cell("CIFAR-10 FedAvg, γ = 0").config(1).hash() == plain
    assert gamma.cell("CIFAR-10 FedAvg, γ = 0.02").config(1).hash() == glad
    assert groups.cell("CIFAR-10 FedAvg + FedGLAD, group-wise").config(1).hash() == glad
    assert find("ratios").cell("CIFAR-10 FedAvg, 10 %").config(1).hash() == plain


def test_what_the_paper_does_not_publish_is_marked():
    ratios = {cell.label: cell.ours for cell in find("ratios").cells}
    assert "re-tuned" in ratios["CIFAR-10 FedAvg, 5 %"]
    assert ratios["CIFAR-10 FedAvg, 10 %"] == ""  # the main table's, published
    assert all("re-tuned" in cell.ours for cell in find("strategies").cells)
    assert all("epochs" in cell.ours for cell in find("centralised").cells)


def test_texts_are_absent_until_there_is_a_preset(monkeypatch: pytest.MonkeyPatch):
    cell = find("main").cell("20NewsGroups FedAvg + FedGLAD")
    lstm = find("bilstm").cell("20NewsGroups FedAvg, BiLSTM")
    if "20news" not in presets.PRESETS:
        assert cell.absent == lstm.absent == ABSENT
        with pytest.raises(PaperError, match="unknown preset '20news'"):
            cell.config(1)
    stand_in = Preset("texts", presets.PRESETS["digits"].tree)
    monkeypatch.setitem(presets.PRESETS, "20news", stand_in)  # type: ignore[arg-type]
    assert cell.absent == ""
    assert cell.config(1).rounds == 100
    assert lstm.absent in ("", "model 'bilstm' not in this version")


def test_special_settings_of_the_appendix():
    scaffold = find("scaffold").cell("MNIST SCAFFOLD, α = 0.1").config(1).to_dict()
    assert (scaffold["client"]["name"], scaffold["client"]["epochs"]) == ("scaffold", 1)
    lstm = find("bilstm").cell("20NewsGroups FedAvg + FedGLAD, BiLSTM")
    assert (lstm.rounds, lstm.overrides["adapter.gamma"]) == (200, 0.01)
    other = find("bilstm").cell("AGNews FedAvgM + FedGLAD, BiLSTM")
    assert (other.rounds, other.overrides["adapter.gamma"]) == (100, 0.02)
    assert other.overrides["server.lr"] == 0.05
    bad = find("bad-round").cells[0].config(1).to_dict()["sampler"]
    assert list(bad["cohorts"]) == ["39"]


def test_words_choose_cells():
    cell = find("main").cell("MNIST FedAvg + FedGLAD")
    assert cell.matches("mnist")
    assert cell.matches("FedAvg mnist")
    assert not cell.matches("fedavgm")
    assert not cell.matches("")
    assert not replace(cell, label="MNIST FedAvgM").matches("fedavg")
    assert find("gamma").cell("CIFAR-10 FedAvg, γ = 0.02").matches("0.02 fedavg")
    assert find("gamma").cell("CIFAR-10 FedAvg, γ = 0.02").matches("cifar10 fedavg")


def test_a_label_chooses_its_cell_and_words_choose_all_that_have_them():
    main = find("main")
    assert [c.label for c in main.chosen(["MNIST FedAvg"])] == ["MNIST FedAvg"]
    both = ["MNIST FedAvg", "MNIST FedAvg + FedGLAD"]
    assert [c.label for c in main.chosen(["fedavg mnist"])] == both
    assert [c.label for c in main.chosen(["MNIST FedAvg + FedGLAD", "MNIST FedAvg"])] == both
    assert len(main.chosen()) == 32


def test_an_unknown_experiment_is_told_with_the_closest():
    with pytest.raises(PaperError, match="did you mean 'gamma'"):
        find("gama")
    with pytest.raises(PaperError, match="choose from main, "):
        find("xyz")
