"""Rounds over a transport in this process: the model of a plain Server, faults, resuming."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedglad.averages import EMA
from fedglad.core.guard import Guard
from fedglad.federation.folder import opened
from fedglad.nvflare.session import Session
from fedglad.optimizers import Adam
from fedglad.runs import Run
from fedglad.runs.folder import RunError
from fedglad.samplers import MD, PowerOfChoice, Uniform

from .sites_support import Sites, by_hand, model, reply, same

FIVE = [f"site-{k}" for k in range(1, 6)]


def play(
    sites: Sites, rounds: int, folder: Path | None = None, *, retries: int = 0, **settings: Any
) -> tuple[Session, list[dict[str, Any]]]:
    """So many rounds as the controller plays them."""
    session = Session(model(), sites, rounds=rounds, **settings)
    with closing(session), opened(folder, session, rounds) as (records, write):
        for _ in range(session.t, rounds):
            records.append(session.line(session.train(retries), {}, {}))
            session.t += 1
            write(records[-1])
    return session, records


@pytest.mark.parametrize("diff", [False, True])
def test_the_model_is_that_of_a_plain_server(diff: bool):
    sampler = Uniform(clients_per_round=3)
    session, records = play(Sites(*FIVE, diff=diff), 4, sampler=sampler, optimizer=Adam(lr=0.1))
    expected = by_hand(model(), records, optimizer=Adam(lr=0.1))
    if diff:  # a difference has been rounded once more
        for name, value in session.server.state.items():
            assert torch.allclose(value, expected[name], atol=1e-5)
    else:
        assert same(session.server.state, expected)
    assert [len(r["clients"]) for r in records] == [3] * 4
    assert all(r["status"] == "stepped" for r in records)


def test_the_params_keep_names_order_kinds_and_dtypes():
    session, _ = play(Sites(*FIVE), 1, average=EMA())
    for params in (session.params(), session.averaged()):
        assert list(params) == list(model())
        assert all(isinstance(value, np.ndarray) for value in params.values())
        assert [v.dtype for v in params.values()] == [v.dtype for v in model().values()]
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in model().items()}
    torches = Session(tensors, Sites(*FIVE)).params()
    assert all(isinstance(value, torch.Tensor) for value in torches.values())
    before = torches["w"].clone()
    torches["w"] += 1  # theirs to change
    assert torch.equal(before, torch.from_numpy(model()["w"]))


def test_clients_are_numbered_by_the_numbers_in_their_names():
    names = [f"site-{k}" for k in range(1, 13)]
    sites = Sites(*sorted(names))  # site-1, site-10, site-11, site-12, site-2, …
    session, _ = play(sites, 1, sampler=Uniform(clients_per_round=4))
    assert session.names == names


def test_one_that_is_faulty_is_left_out_and_nothing_of_it_is_in_the_model():
    def spoilt(one: Any) -> None:
        one.params["w"] = one.params["w"] * np.float32("nan")

    faults = {"site-2": spoilt, "site-4": lambda one: "the client failed: EXECUTION_EXCEPTION"}
    session, records = play(Sites(*FIVE, spoil=faults), 3)
    left_out = {c["id"]: c["rejected"] for c in records[-1]["clients"] if "rejected" in c}
    assert left_out == {
        "site-2": "'w' holds NaN or inf",
        "site-4": "the client failed: EXECUTION_EXCEPTION",
    }
    assert same(session.server.state, by_hand(model(), records))


def test_a_round_is_tried_again_with_others_then_skipped(caplog: pytest.LogCaptureFixture):
    away = {site: lambda one: "it is gone" for site in FIVE[1:]}
    sites = Sites(*FIVE, spoil=away)
    sampler = Uniform(clients_per_round=2)
    _, records = play(sites, 1, retries=4, sampler=sampler)
    assert records[0]["status"] == "stepped"
    assert records[0]["attempts"] == len(sites.asked) > 1
    assert all("are needed" in reason for reason in records[0]["retried"])
    first, second, *_ = ({*names} for _, _, names in sites.asked)
    assert not first & second  # others, while there are any
    assert "site-1" in sites.asked[-1][2]

    _, records = play(Sites(*FIVE, spoil={s: lambda one: "no" for s in FIVE}), 1, retries=1)
    assert records[0]["status"] == "skipped"
    assert records[0]["attempts"] == 2


def test_with_too_few_sites_a_round_is_skipped_and_its_reason_kept():
    session, records = play(Sites("site-1"), 1, min_clients=2)
    assert records[0]["reason"] == "1 sites are connected, at least 2 are needed"
    assert same(session.params(), model())
    assert session.conclude(records, 1) == records[0]["reason"]


def test_sites_that_come_later_get_the_next_places():
    sites = Sites("site-3", "site-7")
    session = Session(model(), sites)
    session.train(0)
    sites.names = ["site-1", "site-7"]
    session.t = 1
    session.train(0)
    assert session.names == ["site-3", "site-7", "site-1"]
    assert {*sites.asked[-1][2]} == {"site-1", "site-7"}


def test_a_run_that_goes_on_has_the_same_bits(tmp_path: Path):
    settings: dict[str, Any] = {
        "sampler": Uniform(clients_per_round=3, seed="run"),
        "optimizer": Adam(lr=0.1),
    }
    whole, records = play(Sites(*FIVE), 6, tmp_path / "whole", average=EMA(), **settings)

    class Killed(Sites):
        def ask(self, sites: Sequence[str], params: Any, t: int, task: str) -> Iterator[Any]:
            for k, one in enumerate(super().ask(sites, params, t, task)):
                if t == 3 and k == 1:
                    raise KeyboardInterrupt
                yield one

    with pytest.raises(KeyboardInterrupt):
        play(Killed(*FIVE), 6, tmp_path / "parts", average=EMA(), **settings)
    assert len(Run(tmp_path / "parts").rounds()) == 3
    late = Sites(*reversed(FIVE))  # known by their names, in whatever order they come
    session, after = play(late, 6, tmp_path / "parts", average=EMA(), **settings)
    assert late.asked[0][0] == 3
    assert same(session.server.state, whole.server.state)
    assert same(session.averaged(), whole.averaged())
    for name in ("model.safetensors", "averaged.safetensors"):
        files = [(tmp_path / part / name).read_bytes() for part in ("whole", "parts")]
        assert files[0] == files[1]

    def facts(lines: list[dict[str, Any]]) -> str:
        return json.dumps([{k: v for k, v in one.items() if k != "seconds"} for one in lines])

    assert facts(records) == facts(after)


def test_a_folder_of_another_run_is_refused_with_what_differs(tmp_path: Path):
    play(Sites(*FIVE), 1, tmp_path)
    with pytest.raises(RunError, match=r"server\.name = 'sgd' and here 'adam'"):
        play(Sites(*FIVE), 1, tmp_path, optimizer=Adam())


def test_a_sampler_by_sizes_leaves_out_whose_size_is_not_known():
    sizes = {"site-1": 10, "site-2": 30, "site-3": 20}
    sites = Sites(*FIVE)
    session, _ = play(sites, 5, sampler=MD(clients_per_round=2), sizes=sizes)
    assert {name for _, _, names in sites.asked for name in names} <= sizes.keys()
    assert session.names == FIVE


def test_power_of_choice_asks_for_losses_by_validation():
    sizes = dict.fromkeys(FIVE, 10)
    sites = Sites(*FIVE)
    sampler = PowerOfChoice(clients_per_round=2, candidates=5)
    play(sites, 1, sampler=sampler, sizes=sizes)
    (_, first, all_five), (_, second, worst) = sites.asked
    assert (first, second) == ("validate", "train")
    assert sorted(all_five) == FIVE
    assert worst == ["site-5", "site-4"]  # site-k says that its loss is k


def test_without_a_weight_a_site_counts_one_and_it_is_said_once(caplog: pytest.LogCaptureFixture):
    def bare(one: Any) -> None:
        one.meta = {}

    _, records = play(Sites(*FIVE, spoil=dict.fromkeys(FIVE, bare)), 2, guard=Guard())
    assert {c["weight"] for r in records for c in r["clients"]} == {0.2}
    said = [r.getMessage() for r in caplog.records if "says no" in r.getMessage()]
    assert sorted(said) == [f"site {s} says no NUM_STEPS_CURRENT_ROUND: it has 1" for s in FIVE]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "there is no initial model"),
        ({"w": np.array([1.0, np.nan])}, "'w' holds NaN or inf"),
        ({"w": np.array(["x"])}, "'w' is no array"),
    ],
)
def test_an_initial_model_that_cannot_be_trained_is_refused(params: Any, message: str):
    with pytest.raises(ValueError, match=message):
        Session(params, Sites())


def test_what_is_no_flmodel_of_arrays_is_a_reason_in_the_record():
    faults = {"site-1": lambda one: reply([1.0]), "site-2": lambda one: reply({"w": "?"})}
    _, records = play(Sites(*FIVE, spoil=faults), 1)
    left_out = {c["id"]: c["rejected"] for c in records[0]["clients"] if "rejected" in c}
    assert left_out["site-1"] == "the params are a list, not a dict of arrays"
    assert "site-2" in left_out
