"""The average of the models on Flower: read out, saved, resumed, tested; clients train on θ."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, Strategy
from safetensors.torch import load_file

from fedglad import Server
from fedglad.analysis.comparison import compare
from fedglad.analysis.grouping import CompareError
from fedglad.averages import EMA, NoAverage, Poly, Window
from fedglad.core import checkpoint
from fedglad.flower import FedGLAD, Monitor, report_norms
from fedglad.optimizers import SGD, Adam
from fedglad.runs.folder import RunError
from fedglad.runs.models import write_models
from fedglad.samplers.uniform import Uniform

from .grid import (
    Clock,
    Linear,
    LocalGrid,
    Normed,
    bits,
    clients,
    facts,
    model,
    numpy,
    received,
    record,
)

ROUNDS = 5


class Stop(Exception):
    pass


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("fedglad.flower.transport.time", found)
    return found


def score(arrays: ArrayRecord) -> dict[str, float]:
    """Two numbers that tell models apart."""
    found = float(np.abs(numpy(arrays)["weight"]).sum())
    return {"accuracy": found % 1.0, "loss": found}


class Judge:
    """An `evaluate_fn` that keeps the models that it was called with; may stop in a round."""

    def __init__(self, stop: int | None = None) -> None:
        self.models: list[tuple[int, ArrayRecord]] = []
        self.stop = stop

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == self.stop:
            raise Stop
        self.models.append((server_round, arrays))
        return MetricRecord(score(arrays))  # pyright: ignore[reportArgumentType]


def play(
    folder: Path | None = None,
    *,
    rounds: int = ROUNDS,
    grid: LocalGrid | None = None,
    evaluate_fn: Any = None,
    **settings: Any,
) -> tuple[FedGLAD, Any]:
    settings.setdefault("fraction_evaluate", 0.0)
    shape: dict[str, Any] = {"nodes": "partition-id", "resume": True}
    strategy = FedGLAD(checkpoint_dir=folder, **shape | settings)
    grid = grid or LocalGrid(clients(5, Normed))
    start = record(model(normed=True))
    return strategy, strategy.start(grid, start, num_rounds=rounds, evaluate_fn=evaluate_fn)


def followed(average: Any, models: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The average of models one after the other, in float64."""
    x: dict[str, np.ndarray] = {}
    for t, theta in enumerate(models):
        for name, value in theta.items():
            if value.dtype.kind != "f":
                x[name] = value
            elif isinstance(average, Window):
                x[name] = np.mean(
                    [m[name] for m in models[max(0, t + 1 - average.size) : t + 1]], 0
                )
            else:
                a = average.share(t)
                x[name] = (1 - a) * x.get(name, 0.0) + a * value.astype(float)
    return x


@pytest.mark.parametrize("average", [EMA(beta=0.5), Poly(), Window(size=2)])
def test_it_is_the_average_of_the_models_that_were_the_results(average: Any):
    judge = Judge()
    strategy, result = play(average=average, evaluate_fn=judge)
    pairs = dict[int, list[ArrayRecord]]()
    for t, arrays in judge.models:
        pairs.setdefault(t, []).append(arrays)
    assert {t: len(both) for t, both in pairs.items()} == {0: 1, 1: 2, 2: 2, 3: 2, 4: 2, 5: 2}
    newest = [numpy(pairs[t][-1]) for t in range(1, ROUNDS + 1)]
    assert bits(newest[-1]) == bits(result.arrays)  # the result is θ
    for t in range(1, ROUNDS + 1):
        expected, found = followed(average, newest[:t]), numpy(pairs[t][0])
        assert list(found) == list(model(normed=True))
        for name, value in found.items():
            assert value.dtype == model(normed=True)[name].dtype
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)
    assert bits(strategy.averaged) == bits(pairs[ROUNDS][0])
    assert bits(strategy.averaged) != bits(result.arrays)


def test_it_changes_nothing_in_training():
    grids = LocalGrid(clients(5, Normed), salt=1), LocalGrid(clients(5, Normed), salt=1)
    plain, with_one = play(grid=grids[0]), play(grid=grids[1], average=EMA(), evaluate_fn=None)
    assert bits(plain[1].arrays) == bits(with_one[1].arrays)
    assert facts(plain[0].records) == facts(with_one[0].records)
    assert [bits(received(m)) for m in grids[0].sent] == [bits(received(m)) for m in grids[1].sent]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_names_order_and_dtypes_are_those_of_the_initial_arrays(dtype: Any):
    strategy = FedGLAD(nodes="partition-id", average=EMA(), fraction_evaluate=0.0)
    first = dict(reversed(model(dtype, normed=True).items()))
    result = strategy.start(LocalGrid(clients(3, Normed)), record(first), num_rounds=2)
    shapes = [(name, value.dtype, value.shape) for name, value in first.items()]
    for arrays in (strategy.averaged, result.arrays):
        assert [(n, x.dtype, x.shape) for n, x in numpy(arrays).items()] == shapes


def test_without_one_there_is_none_and_the_error_says_how_to_have_it():
    strategy = FedGLAD(nodes="partition-id", average=EMA())
    with pytest.raises(ValueError, match=r"no average yet: .*`start`"):
        _ = strategy.averaged
    for none in (None, NoAverage()):
        strategy, _ = play(rounds=1, average=none)
        with pytest.raises(ValueError, match=r"keeps no average: .*FedGLAD\(average=EMA\(\)\)"):
            _ = strategy.averaged


def test_what_cannot_be_meant_is_refused_at_once():
    with pytest.raises(ValueError, match=r"evaluate='all': choose model, averaged, both"):
        FedGLAD(average=EMA(), evaluate="all")  # pyright: ignore[reportArgumentType]
    for average in (None, NoAverage()):
        with pytest.raises(ValueError, match=r"evaluate='averaged' needs an average: .*EMA\(\)"):
            FedGLAD(average=average, evaluate="averaged")  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------------------------------ records


def test_the_server_tests_both_and_the_results_fields_are_of_the_newest(
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level(logging.INFO, "flwr"):
        judge = Judge()
        strategy, result = play(average=EMA(), evaluate_fn=judge)
    for t, found in enumerate(strategy.records, start=1):
        averaged, newest = [score(arrays) for k, arrays in judge.models if k == t]
        assert (found["test_accuracy"], found["test_loss"]) == (newest["accuracy"], newest["loss"])
        assert found["averaged_accuracy"] == averaged["accuracy"]
        assert found["averaged_loss"] == averaged["loss"]
        assert found["metrics"]["server"] == newest
        assert found["metrics"]["averaged_server"] == averaged
        assert dict(result.evaluate_metrics_serverapp[t]) == newest
        both = (100 * found["test_accuracy"], 100 * found["averaged_accuracy"])
        assert "accuracy {:.2f} %, averaged {:.2f} %".format(*both) in caplog.text
    assert list(result.evaluate_metrics_serverapp) == [*range(ROUNDS + 1)]


def test_the_server_tests_the_newest_alone_if_the_average_says_so():
    judge = Judge()
    strategy, _ = play(average=EMA(test=False), evaluate_fn=judge)
    assert [t for t, _ in judge.models] == [*range(ROUNDS + 1)]
    assert not any("averaged_accuracy" in found for found in strategy.records)
    assert bits(strategy.averaged)["names"] == list(model(normed=True))


class Evaluator(Linear):
    """Keeps the models that it is asked to evaluate; says an accuracy, too."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.tested: list[dict[str, np.ndarray]] = []

    def __call__(self, message: Message, context: Context) -> Message:
        reply = super().__call__(message, context)
        if message.metadata.message_type == "evaluate":
            self.tested.append(received(message))
            found = self.loss(self.tested[-1])
            (metrics,) = reply.content.metric_records.values()
            metrics["eval_accuracy"] = found % 1.0
        return reply


@pytest.mark.parametrize("which", ["model", "averaged", "both"])
def test_clients_test_what_they_are_asked_to(which: Any):
    population = [Evaluator(k) for k in range(4)]
    strategy = FedGLAD(
        nodes="partition-id", average=EMA(beta=0.5), evaluate=which, optimizer=SGD(lr=0.7)
    )
    result = strategy.start(LocalGrid(population), record(model()), num_rounds=3)
    weights = np.array([client.n for client in population])
    parts = {"model": ["test"], "averaged": ["averaged"], "both": ["test", "averaged"]}[which]
    for client in population:
        assert len(client.tested) == 3 * len(parts)
    for t, found in enumerate(strategy.records):
        for k, part in enumerate(parts):
            models = [client.tested[len(parts) * t + k] for client in population]
            assert len({str(bits(sent)) for sent in models}) == 1  # all are asked for the same one
            losses = [client.loss(sent) for client, sent in zip(population, models, strict=True)]
            expected = np.average(losses, weights=weights)
            assert found[f"{part}_loss"] == pytest.approx(expected)
            shares = np.average([loss % 1.0 for loss in losses], weights=weights)
            assert found[f"{part}_accuracy"] == pytest.approx(shares)
        assert ("averaged_loss" in found) == ("averaged" in parts)
        assert (found["test_loss"] is None) == ("test" not in parts)
    last = population[0].tested[-1]
    assert bits(last) == bits(strategy.averaged if "averaged" in parts else result.arrays)
    if which == "both":
        assert bits(population[0].tested[-2]) == bits(result.arrays)
    # Flower's result has metrics of the newest model or none, never those of another one.
    assert bool(result.evaluate_metrics_clientapp) == ("test" in parts)


def test_a_loss_without_an_accuracy_is_recorded_too():
    strategy, _ = play(average=EMA(), evaluate="both", fraction_evaluate=1.0)
    assert all(np.isfinite(found["averaged_loss"]) for found in strategy.records)
    assert not any("averaged_accuracy" in found for found in strategy.records)


def test_both_numbers_of_a_record_are_by_the_same_samples():
    """The server tests the newest alone, the clients the average: the two are not compared."""
    strategy, _ = play(
        average=EMA(test=False), evaluate="averaged", fraction_evaluate=1.0, evaluate_fn=Judge()
    )
    for found in strategy.records:
        assert found["test_loss"] == found["metrics"]["server"]["loss"]
        assert "averaged_loss" not in found
        assert np.isfinite(found["metrics"]["averaged_evaluate"]["eval_loss"])


def test_in_a_skipped_round_the_average_stays():
    grid = LocalGrid(clients(3, Normed))
    kept: list[Any] = []

    def lose(server_round: int, arrays: ArrayRecord) -> None:
        if server_round:
            kept.append(bits(strategy.averaged))
        grid.lost = {0, 1, 2} if server_round == 1 else set()

    strategy = FedGLAD(nodes="partition-id", average=EMA(), fraction_evaluate=0.0, on_short="skip")
    strategy.start(grid, record(model(normed=True)), num_rounds=3, evaluate_fn=lose)
    assert [found["status"] for found in strategy.records] == ["stepped", "skipped", "stepped"]
    first, *more = dict.fromkeys(map(str, kept))  # equal ones once
    assert len(more) == 1
    assert str(kept[3]) == first  # round 2, in which `lose` is called twice


def test_sums_alone_have_it_too():
    """`report="norms"`: the same average as by updates, up to rounding."""

    class Normal:
        def __init__(self, inner: Linear) -> None:
            self.app = ClientApp(mods=[report_norms])
            self.app.train()(inner)
            self.inner = inner

        def __call__(self, message: Message, context: Context) -> Message:
            if message.metadata.message_type == "train":
                return self.app(message, context)
            return self.inner(message, context)

    def federation(report: Any) -> FedGLAD:
        strategy = FedGLAD(
            nodes="partition-id", average=EMA(), report=report, fraction_evaluate=0.0
        )
        grid = LocalGrid([Normal(client) for client in clients(5)])
        strategy.start(grid, record(model()), num_rounds=4)
        assert all(found["status"] == "stepped" for found in strategy.records)
        return strategy

    whole, summed = federation("updates"), federation("norms")
    for name, value in numpy(whole.averaged).items():
        np.testing.assert_allclose(numpy(summed.averaged)[name], value, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------- folder


SETTINGS: dict[str, dict[str, Any]] = {
    "ema": {"average": EMA()},
    "window, adam": {"average": Window(size=3), "optimizer": Adam()},
    "poly, sampled": {"average": Poly(), "sampler": Uniform(clients_per_round=3, seed="run")},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stop", [1, 4, ROUNDS])
def test_a_run_that_was_cut_short_has_the_same_bits(name: str, stop: int, tmp_path: Path):
    whole, result = play(evaluate_fn=Judge(), **SETTINGS[name])
    with pytest.raises(Stop):
        play(tmp_path / "run", evaluate_fn=Judge(stop), **SETTINGS[name])
    again, resumed = play(tmp_path / "run", evaluate_fn=Judge(), **SETTINGS[name])
    assert bits(again.averaged) == bits(whole.averaged)
    assert bits(resumed.arrays) == bits(result.arrays)
    assert facts(again.records) == facts(whole.records)


def test_the_folder_has_both_models_and_pytorch_loads_them(tmp_path: Path):
    strategy, result = play(tmp_path / "run", average=EMA(), evaluate_fn=Judge())
    for name, arrays in {"averaged": strategy.averaged, "model": result.arrays}.items():
        loaded = load_file(tmp_path / "run" / f"{name}.safetensors")
        assert {n: v.dtype for n, v in loaded.items()} == {
            n: torch.from_numpy(v).dtype for n, v in model(normed=True).items()
        }
        expected = bits(arrays)
        assert bits({n: loaded[n].numpy() for n in expected["names"]}) == expected
        header = checkpoint.read(tmp_path / "run" / f"{name}.safetensors")[1]
        assert (header["which"], header["round"]) == (name, ROUNDS)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["models"] == {
        f"{name}.safetensors": checkpoint.checksum(tmp_path / "run" / f"{name}.safetensors")
        for name in ("model", "averaged")
    }
    assert summary["final_averaged_accuracy"] == strategy.records[-1]["averaged_accuracy"]
    text = (tmp_path / "run" / "config.toml").read_text()
    assert '[average]\nname = "ema"' in text
    # Asked for again, the finished run writes the same.
    path = tmp_path / "run" / "averaged.safetensors"
    before = checkpoint.checksum(path)
    path.unlink()
    play(tmp_path / "run", average=EMA(), evaluate_fn=Judge())
    assert checkpoint.checksum(path) == before


def test_while_a_finished_run_goes_on_no_old_model_is_there(tmp_path: Path):
    play(tmp_path / "run", rounds=2, average=EMA())
    assert len(list((tmp_path / "run").glob("*.safetensors"))) == 2
    with pytest.raises(Stop):
        play(tmp_path / "run", average=EMA(), evaluate_fn=Judge(3))
    assert not list((tmp_path / "run").glob("*.safetensors"))
    play(tmp_path / "run", average=EMA())
    assert len(list((tmp_path / "run").glob("*.safetensors"))) == 2


def test_without_an_average_the_folder_has_the_model_alone(tmp_path: Path):
    _, result = play(tmp_path / "run")
    found = {path.name for path in (tmp_path / "run").glob("*.safetensors")}
    assert found == {"model.safetensors"}
    loaded = load_file(tmp_path / "run" / "model.safetensors")
    expected = bits(result.arrays)
    assert bits({name: loaded[name].numpy() for name in expected["names"]}) == expected


def test_a_tied_weight_is_in_the_file_under_both_names(tmp_path: Path):
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    net["b"].weight = net["a"].weight
    write_models(tmp_path, Server(net, average=EMA()), 0, "")
    for name in ("model", "averaged"):
        net.load_state_dict(load_file(tmp_path / f"{name}.safetensors"))


def test_a_monitored_strategy_has_no_model_of_ours_in_its_folder(tmp_path: Path):
    from flwr.serverapp.strategy import FedAvg

    strategy = Monitor(FedAvg(), checkpoint_dir=tmp_path / "run")
    strategy.start(LocalGrid(clients(3)), record(model()), num_rounds=2)
    assert (tmp_path / "run" / "summary.json").is_file()
    assert not list((tmp_path / "run").glob("*.safetensors"))


def test_an_average_may_begin_in_a_run_that_had_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """It is that of the models from there on, and training goes on as it would have."""
    whole, result = play(evaluate_fn=Judge())
    play(tmp_path / "run", rounds=3, evaluate_fn=Judge())
    judge = Judge()
    with caplog.at_level(logging.INFO, "flwr"):
        strategy, again = play(tmp_path / "run", average=EMA(beta=0.5), evaluate_fn=judge)
    assert "The run had no average: it is that of the models from 4 on" in caplog.text
    assert bits(again.arrays) == bits(result.arrays)
    assert [found["gsi_all"] for found in strategy.records] == [
        found["gsi_all"] for found in whole.records
    ]
    newest = [numpy(judge.models[1][1]), numpy(judge.models[3][1])]  # rounds 4 and 5
    for name, value in followed(EMA(beta=0.5), newest).items():
        np.testing.assert_allclose(numpy(strategy.averaged)[name], value, rtol=1e-5, atol=1e-6)
    assert [("averaged_loss" in found) for found in strategy.records] == [False] * 3 + [True] * 2
    assert len(compare([tmp_path / "run"]).groups) == 2  # the run, and its averaged model


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"average": None}, r"average.name = 'ema' and here 'none'"),
        ({"average": Poly()}, r"average.name = 'ema' and here 'poly'"),
        ({"average": EMA(beta=0.8)}, r"average.beta = 0.9 and here 0.8"),
        ({"average": EMA(), "optimizer": SGD(lr=0.5)}, r"server.lr = 1.0 and here 0.5"),
    ],
)
def test_another_average_is_refused_and_named(other: Any, said: str, tmp_path: Path):
    play(tmp_path / "run", rounds=2, average=EMA())
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*.safetensors")}
    with pytest.raises(RunError, match=f"holds a run with other settings, {said}.* .config.toml"):
        play(tmp_path / "run", **other)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*.safetensors")} == before


@pytest.mark.parametrize("which", ["averaged", "both"])
def test_such_runs_can_be_compared(which: Any, tmp_path: Path):
    for seed in (1, 2):
        strategy = FedGLAD(
            average=EMA(), evaluate=which, seed=seed, checkpoint_dir=tmp_path / f"run-{seed}"
        )
        population = [Evaluator(k) for k in range(4)]
        strategy.start(LocalGrid(population), record(model()), num_rounds=3)
    folders = [tmp_path / "run-1", tmp_path / "run-2"]
    (averaged,) = compare(folders, metric="last10_averaged_accuracy").groups
    assert averaged.mean > 0
    if which == "both":
        assert len(compare(folders).groups) == 2
    else:
        with pytest.raises(CompareError, match=r"choose from last10_averaged_accuracy"):
            compare(folders)


# -------------------------------------------------------------------------------- others' loops


def test_flowers_own_loop_has_it_too(caplog: pytest.LogCaptureFixture):
    ours, theirs = (
        FedGLAD(nodes="partition-id", average=EMA()),
        FedGLAD(nodes="partition-id", average=EMA(), evaluate="both"),
    )
    ours.start(LocalGrid(clients(4)), record(model()), num_rounds=4)
    population = [Evaluator(k) for k in range(4)]
    with caplog.at_level(logging.WARNING, "flwr"):
        result = Strategy.start(theirs, LocalGrid(population), record(model()), num_rounds=4)
    assert bits(ours.averaged) == bits(theirs.averaged)
    assert bits(population[0].tested[-1]) == bits(result.arrays)
    assert len(population[0].tested) == 4
    assert "evaluate='both' is not used" in caplog.text


def test_in_flowers_loop_a_round_without_replies_is_no_change():
    grid = LocalGrid(clients(4))
    strategy = FedGLAD(nodes="partition-id", average=EMA(), fraction_evaluate=0.0)

    def lose(server_round: int, arrays: ArrayRecord) -> None:
        grid.lost = {0, 1, 2, 3} if server_round == 1 else set()

    Strategy.start(strategy, grid, record(model()), num_rounds=3, evaluate_fn=lose)
    assert len(strategy.averaged) == 2


def test_there_is_no_average_of_models_to_which_noise_was_added():
    """It would be that of the models without the noise, which nobody is to see."""
    inner = FedGLAD(nodes="partition-id", average=EMA(), fraction_evaluate=0.0)
    strategy = DifferentialPrivacyServerSideFixedClipping(inner, 1.0, 1e6, 5)
    state = np.random.get_state()  # noqa: NPY002 - the generator that Flower uses
    try:
        strategy.start(LocalGrid(clients(5)), record(model()), num_rounds=2)
    finally:
        np.random.set_state(state)  # noqa: NPY002
    with pytest.raises(ValueError, match="another strategy has changed them"):
        _ = inner.averaged


def test_config_for_evaluators_is_the_users_for_both():
    strategy = FedGLAD(nodes="partition-id", average=EMA(), evaluate="both")
    configs: list[Any] = []

    class Listening(Evaluator):
        def __call__(self, message: Message, context: Context) -> Message:
            if message.metadata.message_type == "evaluate":
                configs.append(dict(message.content["config"]))
            return super().__call__(message, context)

    grid = LocalGrid([Listening(k) for k in range(2)])
    how = ConfigRecord({"batch": 7})
    strategy.start(grid, record(model()), num_rounds=1, evaluate_config=how)
    assert configs == [{"batch": 7, "server-round": 1}] * 4
