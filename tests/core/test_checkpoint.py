"""A saved state is exact or refused, never half-taken, never half-written; loading runs no code."""

import os
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from contracts.support import Awkward, Correction, bits, cohort, with_extra
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedglad import Glad, Guard, Server
from fedglad.adapters import Adapter, Factors, FedExP
from fedglad.core import checkpoint
from fedglad.core.checkpoint import CheckpointError
from fedglad.filters import MultiKrum, NormClip
from fedglad.optimizers import SGD, Adagrad, Adam, Momentum
from fedglad.weights import FedAdp

MODEL = Awkward()
COHORTS = [with_extra(cohort(MODEL, t), MODEL) for t in range(4)]


@dataclass(frozen=True, kw_only=True)
class Along(Adapter):
    """An own adapter with all that one may keep: a running mean of ḡ, and numbers per group."""

    direction: ClassVar[float | None] = 0.8

    def start(self, groups: Any) -> dict[str, np.ndarray]:
        return {"mean": np.ones(len(groups.labels))}

    def adapt(self, stats: Any, groups: Any, state: Any, t: int) -> Any:
        along = np.tanh(groups.sum(stats.direction))
        mean = 0.9 * state["mean"] + 0.1 * along
        return Factors(along, state["mean"], 1 + 0.1 * mean), {"mean": mean}


def by_initial(name: str) -> str:
    return name[0]


SERVERS: dict[str, dict[str, Any]] = {
    "moments and baseline": {"optimizer": Adam(lr=0.1, betas=(0.8, 0.95)), "adapter": Glad()},
    "a form's own moments": {"optimizer": Adam(form="reddi"), "adapter": Glad(groups="layer")},
    "clients' angles": {"weighting": FedAdp(), "optimizer": Momentum()},
    "a method's vectors": {"method": Correction(), "optimizer": Momentum()},
    "a running direction": {"adapter": Along(), "optimizer": Adagrad(beta1=0.5)},
    "everything": {
        "optimizer": Adam(),
        "adapter": Along(groups=by_initial),
        "filter": MultiKrum(f=1, m=4),
        "weighting": FedAdp(alpha=4.0),
        "method": Correction(),
        "guard": Guard(norm=50, weight=500),
        "min_clients": 2,
    },
    "no guard": {"guard": None, "filter": NormClip(max_norm=0.5)},
}


def stepped(rounds: int = 3, **settings: Any) -> Server:
    server = Server(MODEL, **settings)
    for updates in COHORTS[:rounds]:
        assert server.step(updates).stepped
    return server


def own(settings: dict[str, Any]) -> dict[str, Any]:
    """What a file cannot hold of them."""
    return {n: s for n, s in settings.items() if n == "method" or isinstance(s, Along)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


@pytest.fixture
def saved(path: Path) -> Path:
    """The file of a small server with every kind of state but a method's."""
    server = Server(
        {"w": torch.ones(3, 2), "b": torch.zeros(2)}, optimizer=Momentum(), adapter=Glad()
    )
    for scale in (1.0, 2.0):
        deltas = [{"w": torch.full((3, 2), scale * k), "b": torch.ones(2)} for k in (1, -0.5, 2)]
        server.step(deltas)
    server.save(path)
    return path


def small_model() -> dict[str, Tensor]:
    return {"w": torch.zeros(3, 2), "b": torch.zeros(2)}


@pytest.mark.parametrize("name", SERVERS)
def test_a_state_goes_through_a_file_exactly(name: str, path: Path):
    settings = SERVERS[name]
    server = stepped(**settings)
    server.save(path)
    loaded = Server.load(path, MODEL, **own(settings))
    assert repr(loaded) == repr(server)
    assert (loaded.guard, loaded.min_clients) == (server.guard, server.min_clients)
    assert bits(loaded) == bits(server)
    assert bits(loaded.state) == bits(server.state)
    for updates in (COHORTS[3], COHORTS[0]):
        assert bits(loaded.step(updates)) == bits(server.step(updates))
    assert bits(loaded) == bits(server)


def test_the_examples_above_have_every_kind_of_state():
    found = stepped(**SERVERS["everything"]).state_dict()
    kinds = {name.split("/")[0] for name in found["tensors"]}
    assert kinds == {"params", "slots", "direction", "buffers", "method", "trust"}
    assert found["adapter"]["state"]["mean"]
    assert found["weighting"]["state"]
    assert found["gate"]["norm"] > 0
    assert found["round"] == 3
    assert stepped(adapter=Glad()).state_dict()["adapter"]["state"]["baseline"]


def test_a_state_dict_is_a_copy_and_the_server_keeps_none_of_what_it_loads():
    server = stepped(**SERVERS["everything"])
    saved = server.state_dict()
    kept = bits(saved)
    server.step(COHORTS[3])
    assert bits(saved) == kept
    server.load_state_dict(saved)
    server.step(COHORTS[3])
    assert bits(saved) == kept


def test_a_file_that_is_overwritten_does_not_disturb_who_loaded_it(path: Path):
    server = stepped(1)
    server.save(path)
    loaded = Server.load(path, MODEL)
    before = bits(loaded)
    server.step(COHORTS[1])
    server.save(path)
    assert bits(loaded) == before


def test_a_packed_update_leaves_nothing_behind_that_a_file_forgets():
    """Padding between tensors is no part of the state: it may not carry numbers to later rounds."""
    server = Server(MODEL)
    server.step([torch.ones(server.layout.size)])
    resumed = Server(MODEL)
    resumed.load_state_dict(server.state_dict())
    assert bits(resumed.step(COHORTS[1])) == bits(server.step(COHORTS[1]))
    assert bits(resumed) == bits(server)


def test_tied_and_half_precision_parameters_go_through_a_file(path: Path):
    model = nn.Module()
    model.a, model.b = nn.Linear(2, 2).half(), nn.Linear(2, 2).half()
    model.b.weight = model.a.weight
    server = Server(model)
    server.step([{n: torch.full_like(p, 0.3) for n, p in model.named_parameters()}])
    server.save(path)
    loaded = Server.load(path, model)
    assert bits(loaded) == bits(server)
    assert bits(loaded.state) == bits(server.state)


# --- other models and other settings ---

W, B = torch.zeros(3, 2), torch.zeros(2)
COUNTER = torch.tensor(3)
OTHER_MODELS: dict[str, tuple[dict[str, Tensor], str]] = {
    "name": ({"w": W, "c": B}, "'b' (2,) float32 where this model has parameter 'c' (2,) float32"),
    "order": ({"b": B, "w": W}, "'w' (3, 2) float32 where this model has parameter 'b' (2,)"),
    "shape": ({"w": W.T, "b": B}, "'w' (3, 2) float32 where this model has parameter 'w' (2, 3)"),
    "dtype": ({"w": W, "b": B.half()}, "float32 where this model has parameter 'b' (2,) float16"),
    "missing": ({"w": W}, "only the saved state has parameter 'b' (2,) float32"),
    "extra": ({"w": W, "b": B, "v": W}, "only this model has parameter 'v' (3, 2) float32"),
    "buffer": ({"w": W, "b": B, "n": COUNTER}, "only this model has buffer 'n' () int64"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_is_refused_with_the_first_tensor_that_differs(name: str, saved: Path):
    model, message = OTHER_MODELS[name]
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Server.load(saved, model)
    server = Server(model, optimizer=Momentum(), adapter=Glad())
    before = bits(server)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        server.load_state_dict(Server.load(saved, small_model()).state_dict())
    assert bits(server) == before


def test_a_model_without_the_saved_buffers_is_refused_as_another_model(path: Path):
    stepped(1).save(path)
    with pytest.raises(CheckpointError, match=r"another model.*'temperature'"):
        Server.load(path, nn.Linear(5, 3))


OTHER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": SGD()}, "saved with optimizer Momentum, this server has SGD"),
    ({"optimizer": Adam()}, "saved with optimizer Momentum, this server has Adam"),
    ({"adapter": FedExP(groups="tensor")}, "saved with adapter Glad, this server has FedExP"),
    ({"weighting": FedAdp()}, "saved with weighting Samples, this server has FedAdp"),
    ({"adapter": Glad(groups="all")}, "saved with other groups"),
]


@pytest.mark.parametrize(("other", "message"), OTHER_SETTINGS, ids=str)
def test_other_settings_are_refused_and_change_nothing(other: dict[str, Any], message: str):
    settings: dict[str, Any] = {"optimizer": Momentum(), "adapter": Glad()}
    state = stepped(**settings).state_dict()
    server = stepped(1, **(settings | other))
    before = bits(server)
    with pytest.raises(CheckpointError, match=message):
        server.load_state_dict(state)
    assert bits(server) == before


def test_a_rate_may_change_between_saving_and_loading(saved: Path):
    loaded = Server.load(saved, small_model(), optimizer=Momentum(lr=0.5))
    assert loaded.optimizer == Momentum(lr=0.5)
    assert loaded.round == 2


def test_a_methods_state_needs_its_method(path: Path):
    stepped(method=Correction()).save(path)
    with pytest.raises(
        CheckpointError, match="a client method's vectors: give this server its meth"
    ):
        Server.load(path, MODEL)


def put(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state["tensors"].__setitem__(name, value)


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a wrong shape": put("slots/m/linear.bias", torch.ones(7)),
    "a shape that broadcasts": put("slots/m/linear.bias", torch.ones(1)),
    "a missing tensor": lambda state: state["tensors"].pop("slots/m/linear.bias"),
    "a missing buffer": lambda state: state["tensors"].pop("buffers/norm.running_var"),
    "half a method's vector": put("method/new/linear.bias", torch.ones(3)),
    "no round": lambda state: state.pop("round"),
    "no gate": lambda state: state.pop("gate"),
    "no layout": lambda state: state.pop("layout"),
    "no version": lambda state: state.pop("version"),
    "no tensors": lambda state: state.pop("tensors"),
    "no baseline": lambda state: state["adapter"]["state"].clear(),
    "a short baseline": lambda state: state["adapter"]["state"].update(baseline=[1.0]),
    "a baseline of texts": lambda state: state["adapter"]["state"].update(
        baseline=["x"] * len(state["adapter"]["state"]["baseline"])
    ),
    "a round that is none": lambda state: state.update(round="3"),
    "a round before the first": lambda state: state.update(round=-1),
    "a round without end": lambda state: state.update(round=10**400),
    "a gate of another form": lambda state: state.update(gate=[1.0]),
    "a gate with more": lambda state: state["gate"].update(more=[1.0]),
    "a gate of texts": lambda state: state["gate"].update(norms=["x"]),
    "a gate that no float holds": lambda state: state["gate"].update(norms=[10**400]),
    "no class": lambda state: state["optimizer"].pop("class"),
    "an optimizer that is a text": lambda state: state.update(optimizer="Momentum"),
    "no groups": lambda state: state["adapter"].pop("groups"),
    "no adapter's state": lambda state: state["adapter"].pop("state"),
    "no weighting's state": lambda state: state["weighting"].pop("state"),
    "a weighting's state of texts": lambda state: state["weighting"].update(state={"a": "b"}),
    "a layout of numbers": lambda state: state.update(layout=[1, 2, 3]),
    "a layout without shapes": lambda state: state.update(layout=[["w"]]),
    "tensors that are none": put("slots/m/linear.bias", [1.0]),
    "a list of tensors": lambda state: state.update(tensors=[1.0]),
    "a method without a name": put("method/", torch.ones(3)),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_state_with_a_part_wrong_is_refused_and_changes_nothing(name: str):
    settings: dict[str, Any] = {"optimizer": Momentum(), "adapter": Glad(), "method": Correction()}
    state = stepped(**settings).state_dict()
    EDITS[name](state)
    server = stepped(1, **settings)
    before = bits(server)
    with pytest.raises(CheckpointError):
        server.load_state_dict(state)
    assert bits(server) == before


@pytest.mark.parametrize(
    ("role", "given_again"),
    [("adapter", Along()), ("adapter", Glad(groups=by_initial))],
    ids=["an own class", "a function"],
)
def test_what_a_file_cannot_hold_is_asked_for_again(role: str, given_again: Any, path: Path):
    server = stepped(**{role: given_again})
    server.save(path)
    way_out = re.escape(f"pass it again, Server.load(path, model, {role}=...)")
    with pytest.raises(CheckpointError, match=f"an own {role} .*{way_out}"):
        Server.load(path, MODEL)
    assert bits(Server.load(path, MODEL, **{role: given_again})) == bits(server)


META: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no optimizer": lambda meta: meta.pop("optimizer"),
    "no settings": lambda meta: meta["adapter"].pop("settings"),
    "an unknown name": lambda meta: meta["adapter"]["settings"].update(name="evil"),
    "a name that is none": lambda meta: meta["adapter"]["settings"].update(name=[1]),
    "an unknown setting": lambda meta: meta["optimizer"]["settings"].update(evil=1),
    "a rate that is a text": lambda meta: meta["optimizer"]["settings"].update(lr="x"),
    "a rate below 0": lambda meta: meta["optimizer"]["settings"].update(lr=-1.0),
    "no guard": lambda meta: meta.pop("guard"),
    "a guard of another form": lambda meta: meta.update(guard=[1]),
    "a guard of texts": lambda meta: meta.update(guard={"norm": "x", "weight": "y"}),
    "nobody is needed": lambda meta: meta.update(min_clients=0),
    "clients that are none": lambda meta: meta.update(min_clients="many"),
    "no layout": lambda meta: meta.pop("layout"),
    "a layout of numbers": lambda meta: meta.update(layout=[1, 2]),
    "buffers that are lists": lambda meta: meta.update(layout=[[[1], [2], "f", "buffer"]]),
    "no version": lambda meta: meta.pop("version"),
    "no gate": lambda meta: meta.pop("gate"),
    "no round": lambda meta: meta.pop("round"),
}


@pytest.mark.parametrize("name", META)
def test_a_crafted_file_with_the_right_checksum_is_refused_as_a_checkpoint(name: str, saved: Path):
    tensors, meta = checkpoint.read(saved)
    META[name](meta)
    checkpoint.write(saved, tensors, meta)
    with pytest.raises(CheckpointError):
        Server.load(saved, small_model())


def test_a_crafted_file_that_is_not_an_object_is_refused(saved: Path):
    tensors, _ = checkpoint.read(saved)
    for meta in ([], 3, "x", None, [[]]):
        checkpoint.write(saved, tensors, meta)  # pyright: ignore[reportArgumentType]
        with pytest.raises(CheckpointError):
            Server.load(saved, small_model())
    header = {"fedglad": "[" * 100_000, "crc32": "0"}
    save_file(tensors, saved, metadata=header)
    with pytest.raises(CheckpointError, match="is damaged"):
        Server.load(saved, small_model())


@pytest.mark.parametrize("length", [2**63, 2**40, 100_000_001, 9])
def test_a_header_of_an_absurd_length_is_refused(length: int, saved: Path):
    saved.write_bytes(length.to_bytes(8, "little") + saved.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="is damaged"):
        Server.load(saved, small_model())


# --- damaged files ---


def require_damage_is_noticed(path: Path, damaged: bytes, good: Any) -> None:
    """The damage is reported, or had no meaning: the very same state comes out."""
    path.write_bytes(damaged)
    try:
        loaded = Server.load(path, small_model())
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017 - either way is fine
    else:
        assert (repr(loaded), bits(loaded)) == good


def header_size(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_a_flipped_bit_in_the_tensors_is_reported(mask: int, saved: Path):
    data = saved.read_bytes()
    for at in range(header_size(data), len(data)):
        saved.write_bytes(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match="is damaged, use an earlier one"):
            Server.load(saved, small_model())


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_a_flipped_bit_in_the_header_is_reported_or_means_nothing(mask: int, saved: Path):
    data = saved.read_bytes()
    server = Server.load(saved, small_model())
    good = repr(server), bits(server)
    for at in range(header_size(data)):
        damaged = data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
        require_damage_is_noticed(saved, damaged, good)


def test_a_truncated_file_is_reported(saved: Path):
    data = saved.read_bytes()
    for length in {0, 1, 7, 8, 9, header_size(data) - 1, header_size(data), len(data) - 1} | {
        *range(0, len(data), 13)
    }:
        saved.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="is damaged, use an earlier one"):
            Server.load(saved, small_model())


def test_more_bytes_than_there_should_be_are_reported(saved: Path):
    saved.write_bytes(saved.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="is damaged"):
        Server.load(saved, small_model())


class Explosive:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
def test_a_pickle_is_refused_and_not_run(write: Any, path: Path, tmp_path: Path):
    fuse = tmp_path / "fuse"
    with path.open("wb") as file:
        write(Explosive(fuse), file)
    with pytest.raises(CheckpointError, match="is damaged"):
        Server.load(path, MODEL)
    assert not fuse.exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 100, b"{}" * 100], ids=repr)
def test_a_file_of_another_kind_is_refused(content: bytes, path: Path):
    path.write_bytes(content[:20])
    with pytest.raises(CheckpointError, match="is damaged"):
        Server.load(path, MODEL)


@pytest.mark.parametrize(
    "metadata", [None, {}, {"format": "pt"}, {"fedglad": "no JSON"}, {"fedglad": "[]"}], ids=str
)
def test_somebody_elses_safetensors_file_is_refused(metadata: Any, path: Path):
    save_file({"w": torch.ones(2)}, path, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"is (not a state saved by fedglad|damaged)"):
        Server.load(path, MODEL)


def test_a_file_of_a_later_version_is_refused_by_name(path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "VERSION", 99)
        stepped(1).save(path)
    with pytest.raises(CheckpointError, match="has format version 99, this fedglad reads 1"):
        Server.load(path, MODEL)


def test_a_missing_file_is_said_to_be_missing(path: Path):
    with pytest.raises(
        FileNotFoundError, match=f"there is no saved state at {re.escape(str(path))}"
    ):
        Server.load(path, MODEL)


def test_the_file_is_plain_safetensors_that_others_can_read(saved: Path):
    tensors = load_file(saved)
    assert tensors["params/w"].equal(Server.load(saved, small_model()).params["w"])


# --- writing ---


def test_saving_replaces_the_file_and_leaves_nothing_else_behind(path: Path):
    for rounds in (1, 2):
        server = stepped(rounds)
        server.save(str(path))
        assert list(path.parent.iterdir()) == [path]
        assert bits(Server.load(path, MODEL)) == bits(server)


def test_a_folder_that_is_not_there_is_an_error_and_not_made(path: Path):
    with pytest.raises(Exception, match="No such file or directory"):
        stepped(1).save(path / "in" / "state")
    assert list(path.parent.iterdir()) == []


SAVE_FOREVER = """
    import sys, torch
    from fedglad import Server
    server = Server({"x": torch.zeros(1_000_000), "y": torch.zeros(3)})
    while True:
        server.step([{"x": torch.full((1_000_000,), -1.0), "y": -torch.ones(3)}])
        server.save(sys.argv[1])
        print(server.round, flush=True)
"""


@pytest.mark.slow
def test_a_process_killed_while_saving_leaves_a_whole_file(path: Path):
    rng = random.Random(5)
    model = {"x": torch.zeros(1_000_000), "y": torch.zeros(3)}
    command = [sys.executable, "-c", textwrap.dedent(SAVE_FOREVER), str(path)]
    for _ in range(6):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            lines = [process.stdout.readline() for _ in range(3)]
            time.sleep(rng.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        assert process.returncode == -signal.SIGKILL
        done = int(lines[-1])
        loaded = Server.load(path, model)
        assert loaded.round in (done, done + 1)
        assert loaded.params["x"].eq(loaded.round).all()
        assert loaded.params["y"].eq(loaded.round).all()
    others = set(os.listdir(path.parent)) - {path.name}
    assert all(re.fullmatch(r"\..*tmp.*", name) for name in others), others


FULL_DISK = """
    import resource, sys, torch
    from fedglad import Server
    server = Server({"x": torch.zeros(100_000)})
    server.save(sys.argv[1])
    server.step([{"x": torch.ones(100_000)}])
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    try:
        server.save(sys.argv[1])
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("saved")
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_that_leaves_the_earlier_file(path: Path):
    command = [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout
    assert os.listdir(path.parent) == [path.name]
    loaded = Server.load(path, {"x": torch.ones(100_000)})
    assert loaded.round == 0
    assert not loaded.params["x"].any()
