"""`fedglad.run`: own objects, with a folder and without, callbacks, Ctrl-C, going on."""

import copy
import gc
import pickle
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_support import TINY, cli, outcome, tiny_data
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import fedglad
import fedglad.data
from fedglad.adapters import Adapter, Glad
from fedglad.cli import app
from fedglad.clients import Plain
from fedglad.config.schema import Config, ConfigError, as_section, load
from fedglad.core.given import Given, fingerprint
from fedglad.optimizers import SGD, Adam
from fedglad.runs import Interrupted, Run, RunError
from fedglad.samplers import Uniform

QUICK: dict[str, Any] = {**TINY, "engine.name": "serial", "rounds": 4, "checkpoint_every": 2}
OWN = {key: value for key, value in QUICK.items() if not key.startswith("model.")}
"""The same for a model that is given."""


@dataclass(frozen=True, kw_only=True)
class Halved(Adapter):
    """An own one that a file can name."""

    by: float = 0.5

    def scale(self, stats: Any, groups: Any) -> Any:
        return np.full(len(groups.labels), self.by)


@dataclass(frozen=True, kw_only=True)
class OfCell(Halved):
    """The same as a notebook has it: nobody else can import it."""

    rule: Any = field(default=None, compare=False)


OfCell.__module__ = "__main__"


class Net(nn.Module):
    """A module with parameters of its own, drawn when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))


def run(overrides: Mapping[str, Any] | None = None, **given: Any) -> Any:
    settings = OWN if "model" in given else QUICK
    return fedglad.run("digits", {**settings, **(overrides or {})}, **given)


def net() -> Any:
    torch.manual_seed(3)
    return Net()


# ------------------------------------------------------------------------- what a section may be


def test_an_object_that_a_file_can_hold_stands_in_it_as_if_it_were_named():
    by_name = load("digits", {"adapter.name": "glad", "adapter.gamma": 0.1})[1]
    by_object = load("digits", {"adapter": Glad(gamma=0.1)})[1]
    in_place_of_the_name = load("digits", {"adapter.name": Glad(gamma=0.1)})[1]
    assert by_object == by_name == in_place_of_the_name
    assert by_object.hash() == by_name.hash()
    own: Any = as_section("adapter", Halved(by=0.25))
    assert own["name"] == f"{__name__}:Halved"
    assert own["by"] == 0.25


def test_defaults_of_an_object_are_its_own_and_not_the_presets():
    # digits would give Adam the rate it was tuned to; an object is whole
    assert load("digits", {"server": Adam()})[1].sections["server"] == Adam()


@pytest.mark.parametrize(
    ("section", "thing"),
    [
        ("model", net()),
        ("data", tiny_data(5, 6, 7)),
        ("adapter", OfCell()),
        ("adapter", Glad(groups=lambda name: name[:1])),
        ("task", lambda scores, y: cross_entropy(scores, y)),
        ("sampler", make_dataclass("Nobodys", [], bases=(Uniform,), frozen=True)()),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_what_no_file_can_hold_is_said_in_it_and_told_apart(section: str, thing: Any):
    given = as_section(section, thing)
    assert isinstance(given, Given)
    config = Config.of({section: given})
    text = config.to_toml()
    read = Config.of(__import__("tomllib").loads(text), trusted=())
    assert read.hash() == config.hash() != Config.of({}).hash()
    assert f"fedglad.run(…, {section}=…, out=…, resume=True)" in text
    assert config.own_names() == {}  # no module to import, whatever is in the file
    with pytest.raises(ConfigError, match=rf"\[{section}\] was an object that was given from"):
        read.plan()


def closing_over(k: int) -> Any:
    return lambda scores, y: k * cross_entropy(scores, y)


def other_net() -> Net:
    made = net()
    with torch.no_grad():
        made.linear.bias[0] += 1
    return made


def other_data() -> Any:
    data = tiny_data(5, 6, 7)
    data.x[3] += 1
    return data


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (net(), net(), other_net()),
        (nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.1)),
        (tiny_data(5, 6, 7), tiny_data(5, 6, 7), tiny_data(5, 7, 6)),
        (tiny_data(5, 6, 7), tiny_data(5, 6, 7), other_data()),
        (OfCell(rule=1), OfCell(rule=1), OfCell(rule=2)),
        (closing_over(1), closing_over(1), closing_over(2)),
        (Adam(lr=0.1), Adam(lr=0.1), SGD(lr=0.1)),
    ],
    ids=["parameters", "settings", "sizes", "samples", "fields", "closures", "classes"],
)
def test_a_fingerprint_is_that_of_code_and_contents(one: Any, same: Any, other: Any):
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)


def test_the_code_of_a_class_that_was_typed_in_is_part_of_it():
    def made(body: str) -> Any:
        scope: dict[str, Any] = {"__name__": "__main__", "nn": nn}
        exec(f"class Typed(nn.Module):\n    def forward(self, x):\n        return {body}", scope)
        return scope["Typed"]()

    assert fingerprint(made("x + 1")) == fingerprint(made("x + 1")) != fingerprint(made("x + 2"))


def test_so_are_the_values_of_a_class_that_was_typed_in():
    def made(rate: float) -> Any:
        scope: dict[str, Any] = {"__name__": "typed_in"}
        exec(f"class Rule:\n    rate = {rate}", scope)
        return scope["Rule"]()

    assert fingerprint(made(0.5)) == fingerprint(made(0.5)) != fingerprint(made(0.25))


def test_samples_that_are_drawn_anew_each_time_are_no_part_of_it():
    class Noisy:
        clients = 2

        def size(self, k: int) -> int:
            return 3

        def client(self, k: int = 0) -> Any:
            return torch.randn(3, 4), torch.zeros(3, dtype=torch.int64)

        test = client

    assert fingerprint(Noisy()) == fingerprint(Noisy())


# --------------------------------------------------------------------------- what a run gives


def test_a_run_gives_its_model_and_leaves_the_modules_of_its_user_alone(tmp_path: Path):
    module = net()
    before = copy.deepcopy(module.state_dict())
    done = run({"average.name": "ema"}, model=module, out=tmp_path / "run")
    assert done.finished
    assert done.folder == tmp_path / "run"
    for which, model in {"model": done.model, "averaged": done.averaged}.items():
        kept = load_file(tmp_path / f"run/{which}.safetensors")
        assert type(model) is Net
        assert model is not module
        assert not model.training
        assert all(model.state_dict()[name].equal(value) for name, value in kept.items())
    assert all(module.state_dict()[name].equal(value) for name, value in before.items())
    assert module.training
    assert not done.model.linear.weight.equal(done.averaged.linear.weight)
    assert done.model.linear.weight.equal(done.server.state["linear.weight"])


def test_a_run_is_the_one_of_the_command_with_its_folder(tmp_path: Path):
    """The same bits, files and hash, whether objects or names were given."""
    by_object = run(adapter=Glad(gamma=0.1), server=Adam(lr=0.01), out=tmp_path / "object")
    args = [f"--set={key}={value}" for key, value in QUICK.items()]
    more = ["adapter.name=glad", "adapter.gamma=0.1", "server.name=adam", "server.lr=0.01"]
    call = ["run", "digits", *args, *(f"--set={one}" for one in more)]
    done = CliRunner().invoke(app, [*call, "--out", str(tmp_path / "name")])
    assert done.exit_code == 0, done.output
    assert outcome(tmp_path / "object") == outcome(tmp_path / "name")
    assert by_object.rounds["test_accuracy"].tolist() == [
        one["test_accuracy"] for one in Run(tmp_path / "name").rounds()
    ]


def test_without_a_folder_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = run(adapter=Halved())
    (folder,) = tmp_path.iterdir()
    assert done.folder is None
    assert folder.name.startswith("fedglad-run-")
    assert len(done.rounds) == 4
    assert done.rounds["round"].tolist() == [0, 1, 2, 3]
    assert done.report(tmp_path / "page.html").read_text("utf-8").startswith("<!")
    model = done.model
    del done
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert model(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_it_can_be_kept_after_all(tmp_path: Path):
    done = run()
    hashed = load("digits", QUICK)[1].hash()
    assert done.keep(tmp_path / "kept") == done.folder == tmp_path / "kept"
    assert load(tmp_path / "kept/config.toml")[1].hash() == hashed
    with pytest.raises(RunError, match="is there already"):
        done.keep(tmp_path / "kept")
    assert done.model is not None


def test_a_folder_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = run(out=True)
    assert str(done.folder) == f"runs/digits-{load('digits', QUICK)[1].hash()}"


def test_what_is_finished_is_not_run_again(tmp_path: Path):
    first, seen = run(adapter=OfCell(), out=tmp_path / "run"), list[int]()
    again = run(
        adapter=OfCell(), out=tmp_path / "run", callbacks=lambda round, server: seen.append(round.t)
    )
    assert seen == []
    assert again.rounds.equals(first.rounds)
    assert again.model.state_dict().keys() == first.model.state_dict().keys()
    with pytest.raises(RunError, match=r"has not trained the run in .*, so it has no server"):
        _ = again.server


def test_a_config_a_dict_and_names(tmp_path: Path):
    config = load("digits", QUICK)[1]
    tree = config.to_dict()
    runs = [
        fedglad.run(config, adapter="none"),
        fedglad.run(tree, adapter="none"),
        run(adapter="none"),
    ]
    assert len({one.rounds["test_loss"].iloc[-1] for one in runs}) == 1
    assert fedglad.run(tree, rounds=1, seed=2).rounds.shape[0] == 1


def test_a_model_function_and_settings_of_data():
    from fedglad.data import Digits
    from fedglad.models import SoftmaxRegression

    def narrow(width: int = 4) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))

    done = run(model=narrow, data=Digits(clients=12))
    assert done.config["model"]["width"] == 4
    assert done.config["data"]["clients"] == 12
    assert "from_python" not in done.config["data"]
    assert len(done.model) == 3
    (first,) = fedglad.simulate(
        "digits",
        {**QUICK, "rounds": 1},
        model=SoftmaxRegression(features=64),
        data=Digits(clients=12),
    )
    assert max(first.cohort) < 12


def test_data_that_is_given_has_a_validation_set_as_any_other():
    given = {"data.validation": 0.25, "sampler.clients_per_round": 2}
    done = run(given, model=nn.Linear(64, 10), data=tiny_data(20, 30, 40))
    assert done.rounds["validation_loss"].notna().all()
    assert done.load("best") is not None
    by_simulate = list(
        fedglad.simulate(
            "digits", {**OWN, **given}, model=nn.Linear(64, 10), data=tiny_data(20, 30, 40)
        )
    )
    assert len(by_simulate) == len(done.rounds)
    with pytest.raises(ConfigError, match=r"data\.validation = 2: must be in \[0, 1\)"):
        run({"data.validation": 2}, data=tiny_data(20, 30))


@pytest.mark.parametrize(("progress", "lines"), [(True, 4), ("auto", 0), (False, 0)])
def test_progress_outside_of_a_terminal(
    progress: Any, lines: int, capsys: pytest.CaptureFixture[str]
):
    run(progress=progress)
    assert capsys.readouterr().out.count("clients/s") == lines


def test_how_a_run_looks():
    done = run({"rounds": 2, "average.name": "none"})
    accuracy = done.rounds["test_accuracy"].iloc[-1]
    assert repr(done) == f"<run digits; 2 of 2 rounds; accuracy {100 * accuracy:.2f} %>"
    assert f"<td>accuracy {100 * accuracy:.2f} %</td>" in done._repr_html_()
    done.name = "<b>"
    assert "<b>" not in done._repr_html_()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adaptr": Glad()}, "unknown key 'adaptr': did you mean 'adapter'?"),
        ({"adapter": Glad}, r"\[adapter\] is the class Glad: give an object, such as Glad\(\)"),
        ({"adapter": Adam()}, "a class of another kind"),
        ({"overrides": {"adapter": Glad()}, "adapter": Glad()}, "adapter is given twice"),
        (
            {"overrides": {"adapter": OfCell(), "adapter.by": 1}},
            "adapter.by = 1: .* set 'by' where",
        ),
        ({"overrides": {"model.name": "mlp"}, "model": Net()}, "model is given twice"),
        ({"overrides": {"model.width": 3}, "model": Net()}, "model.width = 3: .* 'width' where it"),
        ({"resume": True}, "resume and force are for a run that is kept: say where, out="),
        ({"model": nn.Linear(3, 10)}, "cannot take the data's inputs"),
        ({"data": [1, 2]}, "the data is a list without clients"),
        ({"model": Net(), "task": "regression"}, "no labels|regression"),
        ({"callbacks": [3]}, "callback 3: it must be a function of"),
        ({"progress": "yes"}, "progress = 'yes': must be True, False or 'auto'"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_mistakes_are_said_in_a_sentence(given: dict[str, Any], said: str):
    overrides = given.pop("overrides", None)
    with pytest.raises(ValueError, match=said) as caught:
        run(overrides, **given)
    assert "\n" not in str(caught.value)
    assert not hasattr(caught.value, "run")


# ------------------------------------------------------------------------------------ callbacks


class Patience:
    """Ends a run after so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.seen = rounds, list[Any]()

    def round_end(self, round: Any, server: Any) -> Any:
        self.seen.append((round.t, float(server.params["weight"].norm())))
        return len(self.seen) == self.rounds


def test_a_callback_ends_a_run_with_everything_saved(tmp_path: Path):
    patience = Patience(3)
    done = run(out=tmp_path / "run", callbacks=[patience])
    assert [t for t, _ in patience.seen] == [0, 1, 2]
    assert len({norm for _, norm in patience.seen}) == 3  # the server has moved
    assert done.finished
    assert done.stopped == "callback Patience"
    assert done.summary["rounds"] == 3
    assert (tmp_path / "run/model.safetensors").is_file()
    assert "3 of 4 rounds" in repr(done)
    assert "stopped: callback Patience" in repr(done)


@pytest.mark.parametrize("client", ["plain", "scaffold"])  # the second remembers
def test_a_run_that_was_ended_goes_on_to_the_same_bits(client: str, tmp_path: Path):
    def enough(round: Any, server: Any) -> Any:
        return round.t == 0 and "enough"

    whole = run({"client.name": client}, out=tmp_path / "whole")
    ended = run({"client.name": client}, out=tmp_path / "ended", callbacks=enough)
    assert ended.stopped == "callback enough: enough"
    early = ended.model
    assert ended.resume() is ended
    assert outcome(tmp_path / "ended") == outcome(tmp_path / "whole")
    assert ended.stopped == ""
    assert early is not ended.model
    assert ended.rounds["test_loss"].equals(whole.rounds["test_loss"])


def test_an_exception_in_a_callback_loses_nothing():
    def broken(round: Any, server: Any) -> None:
        if round.t == 2:
            raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column") as caught:
        run(callbacks=broken)
    notes = " ".join(caught.value.__notes__)
    assert "In the callback broken, after round 2." in notes
    assert "resume()" in notes
    so_far = caught.value.run  # pyright: ignore[reportAttributeAccessIssue]
    assert len(so_far.rounds) == 3
    assert not so_far.finished
    assert "not finished" in repr(so_far)
    assert so_far.model is not None
    so_far.resume()
    assert so_far.rounds["test_loss"].equals(run().rounds["test_loss"])


def test_an_answer_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"it gave back 0\.5: True or a text ends the run"):
        run(callbacks=lambda round, server: 0.5)


def test_callbacks_of_simulate():
    patience, others = Patience(2), list[int]()
    rounds = list(
        fedglad.simulate(
            "digits", QUICK, callbacks=[patience, lambda round, server: others.append(round.t)]
        )
    )
    assert [one.t for one in rounds] == others == [0, 1]


def test_rounds_of_simulate_give_the_server():
    rounds = list(fedglad.simulate("digits", {**QUICK, "average.name": "ema"}))
    first, *_, last = rounds
    assert first.server is last.server  # one server, as it is now
    assert last.server.round == 4
    assert last.server.averaged.keys() == last.server.state.keys()
    light = pickle.dumps(last)
    assert len(light) < 20_000
    back = pickle.loads(light)
    assert back == last
    for alike in (back, copy.copy(last), copy.deepcopy(last)):
        with pytest.raises(AttributeError, match="this round has no server"):
            _ = alike.server


# -------------------------------------------------------------------------- Ctrl-C, and going on


def interrupts(at: int) -> Any:
    def press(round: Any, server: Any) -> None:
        if round.t == at:
            signal.raise_signal(signal.SIGINT)

    return press


@pytest.mark.parametrize("kept", [True, False], ids=["in a folder", "nowhere"])
def test_ctrl_c_ends_it_after_the_round_and_it_goes_on(kept: bool, tmp_path: Path):
    out = tmp_path / "run" if kept else None
    with pytest.raises(
        Interrupted, match=r"stopped after 2 of 4 rounds, all saved: .* resume\(\)"
    ) as caught:
        run(model=net(), adapter=OfCell(), out=out, callbacks=interrupts(1))
    assert ("out=" in str(caught.value)) == kept
    so_far = caught.value.run  # pyright: ignore[reportAttributeAccessIssue]
    assert len(so_far.rounds) == 2
    so_far.resume()
    whole = run(model=net(), adapter=OfCell())
    assert so_far.rounds["test_loss"].equals(whole.rounds["test_loss"])
    assert so_far.model.linear.weight.equal(whole.model.linear.weight)


def test_in_another_thread_a_callback_ends_it():
    """Ctrl-C reaches the main thread alone."""
    asked, found = threading.Event(), list[Any]()

    def work() -> None:
        found.append(run(callbacks=lambda round, server: asked.is_set() and "asked"))

    asked.set()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found[0].stopped.endswith(": asked")
    assert len(found[0].rounds) == 1


def interrupted(folder: Path, **given: Any) -> None:
    with pytest.raises(Interrupted):
        run(out=folder, callbacks=interrupts(0), **given)


def test_the_same_objects_given_again_go_on(tmp_path: Path):
    interrupted(tmp_path / "run", model=net(), adapter=OfCell(by=0.25))
    with pytest.raises(RunError, match="holds an unfinished run: go on with resume=True"):
        run(model=net(), adapter=OfCell(by=0.25), out=tmp_path / "run")
    done = run(model=net(), adapter=OfCell(by=0.25), out=tmp_path / "run", resume=True)
    whole = run(model=net(), adapter=OfCell(by=0.25), out=tmp_path / "whole")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert done.config == whole.config


def test_others_are_refused_by_what_they_are(tmp_path: Path):
    interrupted(tmp_path / "run", model=net(), adapter=OfCell(by=0.25))
    for given, said in {
        "model": "begun with another model: it was Net, 2 tensors, 650 parameters",
        "adapter": r"begun with another adapter: it was OfCell\(.*by=0.25.* now it is .*by=0.75",
    }.items():
        objects: dict[str, Any] = {"model": net(), "adapter": OfCell(by=0.25)}
        objects[given] = other_net() if given == "model" else OfCell(by=0.75)
        with pytest.raises(RunError, match=said):
            run(**objects, out=tmp_path / "run", resume=True)


def test_a_run_that_was_opened_goes_on_with_objects_given_again(tmp_path: Path):
    interrupted(tmp_path / "run", model=net(), adapter=OfCell())
    with pytest.warns(UserWarning, match="the run is not finished, rounds recorded: 1 of 4"):
        opened: Any = fedglad.load_runs(tmp_path)[0]
    with pytest.raises(ConfigError, match=r"\[model\] was an object that was given from Python"):
        opened.resume()
    with pytest.raises(RunError, match=r"give a module of its kind, run\.load"):
        _ = opened.model
    module: Any = Net()
    assert opened.load(into=module).linear.weight.shape == module.linear.weight.shape
    assert not opened.load(into=module).linear.weight.equal(module.linear.weight)
    with pytest.raises(RunError, match="is of another model: "):
        opened.load(into=nn.Linear(3, 3))
    opened.resume(model=net(), adapter=OfCell())
    whole = run(model=net(), adapter=OfCell())
    assert opened.rounds["test_loss"].equals(whole.rounds["test_loss"])
    assert opened.model.linear.weight.equal(whole.model.linear.weight)


def test_own_settings_that_a_file_names_go_on_from_the_folder_alone(tmp_path: Path):
    interrupted(tmp_path / "run", adapter=Halved(by=0.25))
    with pytest.warns(UserWarning, match="not finished"):
        (opened,) = fedglad.load_runs(tmp_path / "run")
    opened.resume()
    assert opened.rounds["test_loss"].equals(run(adapter=Halved(by=0.25)).rounds["test_loss"])


def test_a_run_without_its_state_does_not_begin_anew_in_silence(tmp_path: Path):
    ended = run(out=tmp_path / "run", callbacks=lambda round, server: True)
    for path in (tmp_path / "run/checkpoints").iterdir():
        path.unlink()
    with pytest.raises(RunError, match=r"the run in .* has no checkpoint left to go on from"):
        ended.resume()
    assert ended.finished


@pytest.mark.filterwarnings("ignore:going on after round")
@pytest.mark.parametrize("kept", [True, False], ids=["in a folder", "nowhere"])
def test_a_finished_run_is_made_longer(kept: bool, tmp_path: Path):
    done = run({"rounds": 2}, model=net(), out=tmp_path / "run" if kept else None)
    done.resume(rounds=4)
    whole = run(model=net())
    assert done.rounds["test_loss"].equals(whole.rounds["test_loss"])
    assert done.model.linear.weight.equal(whole.model.linear.weight)
    assert done.config["rounds"] == 4


@pytest.mark.filterwarnings("ignore:going on after round")
def test_a_folder_that_its_settings_name_stays_when_the_run_is_made_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    short = run({"rounds": 1}, out=True)
    begun, played = short.folder, list[int]()

    def note(round: Any, server: Any) -> None:
        played.append(round.t)

    longer = run({"rounds": 2}, out=True, resume=True, callbacks=note)
    assert played == [1]  # the first was there
    assert short.resume(rounds=3, callbacks=note) is short
    assert played == [1, 1, 2]
    assert len({begun, longer.folder, short.folder}) == 3
    assert len(run({"rounds": 1}, out=True).rounds) == 1  # it is still there
    fresh = run({"rounds": 3})
    assert short.rounds["test_loss"].equals(fresh.rounds["test_loss"])


def test_rates_over_all_rounds_of_an_object_are_not_taken_for_those_of_a_longer_run(
    tmp_path: Path,
):
    cls = make_dataclass("OfCellClient", [], bases=(Plain,), frozen=True, kw_only=True)
    shared: dict[str, Any] = {"batch_size": 16, "rounds_schedule": "linear"}
    settings = {key: v for key, v in QUICK.items() if not key.startswith("client.")}
    out = tmp_path / "run"
    done: Any = fedglad.run("digits", {**settings, "rounds": 2}, client=cls(**shared), out=out)
    with pytest.raises(RunError, match=r"client.rounds_schedule = 'linear' falls.*Run all rounds"):
        done.resume(rounds=3)
    assert done.finished
    assert len(done.rounds) == 2


def test_objects_in_the_overrides_of_simulate():
    (by_object,) = fedglad.simulate("digits", {**QUICK, "rounds": 1, "adapter": OfCell(by=0.25)})
    assert set(by_object.record.scale.values()) == {0.25}
    config = load("digits", {**QUICK, "rounds": 1, "adapter.name": OfCell(by=0.25)})[1]
    (again,) = fedglad.simulate(config, {"seed": 1})  # the object is still there
    assert again.test_loss == by_object.test_loss


@pytest.fixture(scope="module")
def of_objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in their object alone."""
    folder = tmp_path_factory.mktemp("objects")
    for by in (0.25, 0.75):
        run({"rounds": 2}, adapter=OfCell(by=by), out=folder / f"{by}")
    return folder


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        ("compare {}", 0, "adapter.by=0.25"),
        ("check {}/0.25", 0, "0.25: 8 good"),
        ("config {}/0.25/config.toml", 0, "from_python = "),
        ("report {} --out {}/page.html", 0, "Page: "),
        ("replay {}/0.25", 2, "the run's rule was an object that was given from Python"),
        ("replay {}/0.25 --set adapter.name=glad", 0, "its own rule is not known here"),
        (
            "sweep {}/0.25/config.toml --grid seed=1,2 --control --out {}/sweep",
            2,
            "[adapter] was an object that was given from Python",
        ),
        ("run {}/0.25/config.toml --out {}/0.25", 0, "This run is finished already"),
    ],
)
def test_the_command_reads_runs_of_objects(of_objects: Path, call: str, code: int, said: str):
    done = CliRunner().invoke(app, call.replace("{}", str(of_objects)).split())
    assert done.exit_code == code, done.output
    assert said in " ".join(done.output.split())


@pytest.mark.slow
def test_the_command_refuses_to_go_on_with_an_object_and_says_what_to_give(tmp_path: Path):
    folder = tmp_path / "run"
    interrupted(folder, adapter=OfCell())
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = cli("run", folder / "config.toml", "--out", folder, "--resume", "--trust-code")
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "[adapter] was an object that was given from Python, OfCell(" in said
    assert "fedglad.run(…, adapter=…, out=…, resume=True)" in said
    assert before == {path: path.read_bytes() for path in before}


def test_a_run_all_of_whose_rounds_were_skipped_says_so():
    x, y = np.full((20, 8), np.nan, dtype=np.float32), np.zeros(20, dtype=np.int64)
    broken = fedglad.data.from_arrays([(x, y)] * 6, test=(np.zeros((5, 8), np.float32), y[:5]))
    with pytest.warns(UserWarning, match="3 of 3 rounds were skipped"):
        done = fedglad.run("digits", {"rounds": 3}, model=nn.Linear(8, 2), data=broken)
    assert "3 skipped" in repr(done)
