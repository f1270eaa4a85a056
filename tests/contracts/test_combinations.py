"""What every allowed combination promises: same bits, exact resume, inputs left alone."""

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from fedglad import Server, Update
from fedglad.core.layout import BLOCK, LARGE
from fedglad.core.layout import ROWS as SIZES_OF_ROWS
from fedglad.records import Failure
from fedglad.server.server import REGISTRIES

from .support import (
    POPULATION,
    ROWS,
    Awkward,
    Correction,
    Parts,
    bits,
    cohort,
    draw,
    make,
    refusal,
    threads,
    with_extra,
)


def by_initial(name: str) -> str:
    return name[0]


GROUPINGS = ("tensor", "layer", "all", by_initial)

MODEL = Awkward()
COHORTS = [cohort(MODEL, t) for t in range(4)]
BEFORE = bits([COHORTS, MODEL.state_dict()])


def combine(names: Iterable[str], **own: Any) -> Parts:
    rows = zip(REGISTRIES, names, strict=True)
    return {role: make(role, name, **own if role == "adapter" else {}) for role, name in rows}


def offered() -> list[tuple[tuple[str, ...], Any, Parts]]:
    """Rows that can meet, with their grouping: every optimizer, adapter, filter and weighting with
    the default grouping; groupings, which only optimizers and adapters meet, with every one of
    those; averages, which only see the model, with every optimizer; estimators, which see the
    updates, with every filter and weighting."""
    found: list[tuple[tuple[str, ...], Any, Parts]] = []
    for grouping, names in product(GROUPINGS, product(*REGISTRIES.values())):
        optimizer, adapter, *others, estimator, average = names
        usual = others == ["none", "samples"] and estimator == "none"
        if grouping != GROUPINGS[0] and not (usual and average == "none"):
            continue
        if estimator != "none" and (optimizer, adapter, average) != ("momentum", "glad", "none"):
            continue
        if average != "none" and not (usual and adapter == "glad"):
            continue
        found.append((names, grouping, combine(names, groups=grouping)))
    return found


OFFERED = offered()


def threes(names: tuple[str, ...], grouping: Any) -> set[Any]:
    """Each three of the rows and the grouping, with their places."""
    return {*combinations(enumerate([*names, grouping]), 3)}


def covering(allowed: bool) -> list[Any]:
    """So many of the combinations that any three rows which can meet do meet.

    A server's parts know each other through what one hands to the next: a filter and a weighting
    read the updates, an optimizer their mean, an adapter the statistics, and no rule of the server
    asks for more than two of them. What only a fourth row brought about would need a rule that asks
    for four. Rows are counted through (the sum of their places), so that few combinations do.
    """
    places = [{name: k for k, name in enumerate(registry)} for registry in REGISTRIES.values()]
    least = min(len(REGISTRIES[role]) for role in ("adapter", "filter", "weighting"))

    def turn(one: tuple[tuple[str, ...], Any, Parts]) -> int:
        return sum(place[name] for place, name in zip(places, one[0], strict=True)) % least

    found: list[Any] = []
    met: set[Any] = set()
    for names, grouping, parts in sorted(OFFERED, key=turn):
        new = threes(names, grouping) - met
        if new and (refusal(parts) is None) == allowed:
            met |= new
            label = grouping if isinstance(grouping, str) else "function"
            found.append(pytest.param(parts, id="-".join([*names, label])))
    return found


def run(server: Server, cohorts: Iterable[Iterable[Update]]) -> list[Any]:
    return [server.step(updates, population=POPULATION) for updates in cohorts]


@pytest.mark.parametrize("parts", covering(allowed=False))
def test_a_combination_that_means_nothing_is_refused(parts: Parts):
    with pytest.raises(ValueError, match=refusal(parts)):
        Server(MODEL, **parts)


@pytest.mark.parametrize("parts", covering(allowed=True))
def test_a_combination_repeats_resumes_exactly_and_leaves_its_inputs_alone(parts: Parts):
    """Lists on one thread, through all four rounds, against streams on three threads, whose server
    is another one from the third round on: one that was given what the first had saved."""
    server = Server(MODEL, **parts)
    first = run(server, COHORTS[:2])
    saved = server.state_dict()
    kept = bits(saved)
    last = run(server, COHORTS[2:])
    assert all(record.stepped for record in first + last), [r.reason for r in first + last]

    with threads(3):
        streamed, resumed = Server(MODEL, **parts), Server(MODEL, **parts)
        assert bits(run(streamed, map(iter, COHORTS[:2]))) == bits(first)
        assert bits(streamed) == kept
        resumed.load_state_dict(saved)
        assert bits(run(resumed, map(iter, COHORTS[2:]))) == bits(last)
    assert bits(resumed) == bits(server)

    assert bits([COHORTS, MODEL.state_dict()]) == BEFORE
    assert bits(saved) == kept
    for record in first + last:
        plain = record.to_dict()
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain


@pytest.mark.parametrize(("role", "name"), ROWS)
def test_every_row_goes_through_a_file(role: str, name: str, tmp_path: Path):
    server = Server(MODEL, min_clients=3, **{role: make(role, name)})
    run(server, COHORTS[:2])
    server.save(tmp_path / "state")
    loaded = Server.load(tmp_path / "state", MODEL)
    assert repr(loaded) == repr(server)
    assert bits(loaded) == bits(server)
    assert bits(run(loaded, COHORTS[2:])) == bits(run(server, COHORTS[2:]))
    assert bits(loaded) == bits(server)


ROW = SIZES_OF_ROWS[1][1]
SIZES = (0, ROW - 1, ROW, ROW + 1, LARGE - 1, LARGE, LARGE + 1, BLOCK + ROW + 1)
WIDE = {f"{size}.x": draw((size,), size) for size in SIZES}
WIDE_COHORT = [
    Update({n: draw((x.numel(),), k, i) for i, (n, x) in enumerate(WIDE.items())}, client=k)
    for k in range(5)
]
WIDE_COHORT[1] = replace(WIDE_COHORT[1], weight=2.5)
WIDE_COHORT[2] = replace(WIDE_COHORT[2], delta=None, model=WIDE_COHORT[2].delta)


@pytest.mark.parametrize(("role", "name"), ROWS)
def test_tensors_that_cross_blocks_give_the_same_bits_on_any_threads_and_as_a_stream(
    role: str, name: str
):
    """Lists on one thread against a stream on two and a list on three: the forms and the threads
    have to agree in each round, so that one round of each shows what two would."""

    def final(*rounds: tuple[int, Any]) -> Any:
        server, records = Server(WIDE, **{role: make(role, name)}), list[Any]()
        for (n, form), updates in zip(rounds, (WIDE_COHORT, WIDE_COHORT[::-1]), strict=True):
            with threads(n):
                records += run(server, [form(updates)])
        return bits([records, server])

    assert final((2, iter), (3, list)) == final((1, list), (1, list))


@pytest.mark.parametrize("bad", [(), (0,), (1, 32), (31, 32, 33), tuple(range(0, 70, 2))])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 65, 70])
def test_a_long_list_is_summed_like_a_stream(count: int, bad: tuple[int, ...]):
    updates = [COHORTS[k % 4][-1 - k % 2] for k in range(count)]
    updates = [replace(u, weight=-1) if k in bad else u for k, u in enumerate(updates)]
    glad = make("adapter", "glad")
    listed, streamed, clean = (Server(MODEL, adapter=glad, guard=None) for _ in range(3))
    assert bits(listed.step(updates)) == bits(streamed.step(iter(updates)))
    # One that is left out keeps its place: the blocks of the others stay the same.
    clean.step([u if u.weight > 0 else Failure(k, "lost") for k, u in enumerate(updates)])
    assert bits(listed) == bits(streamed) == bits(clean)


@pytest.mark.parametrize("name", REGISTRIES["filter"])
def test_a_client_method_gives_the_same_bits_as_a_stream_and_after_a_resume(name: str):
    cohorts = [with_extra(updates, MODEL) for updates in COHORTS]
    listed, streamed, resumed = (
        Server(MODEL, method=Correction(), filter=make("filter", name)) for _ in range(3)
    )
    records = run(listed, cohorts[:2])
    saved = listed.state_dict()
    records += run(listed, cohorts[2:])
    assert bits(run(streamed, map(iter, cohorts))) == bits(records)
    assert bits(streamed) == bits(listed)
    resumed.load_state_dict(saved)
    assert bits(run(resumed, cohorts[2:])) == bits(records[2:])
    assert bits(resumed) == bits(listed)


@pytest.mark.parametrize("name", REGISTRIES["filter"])
def test_a_client_method_that_does_nothing_changes_nothing(name: str):
    def nothing(mean: Any, extra_sum: Any, count: int, state: Any) -> Any:
        return {}, None

    plain = Server(MODEL, filter=make("filter", name), guard=None)
    with_method = Server(MODEL, filter=make("filter", name), method=nothing, guard=None)
    expected = run(plain, COHORTS)
    assert bits(run(with_method, [with_extra(c, MODEL) for c in COHORTS])) == bits(expected)
    assert bits(with_method) == bits(plain)


@pytest.mark.parametrize(("role", "name"), ROWS)
def test_a_round_that_breaks_off_changes_nothing(role: str, name: str):
    def breaks_off(updates: list[Update]) -> Iterable[Update]:
        yield from updates
        raise ConnectionError("the cohort was lost")

    server = Server(MODEL, **{role: make(role, name)})
    for updates in COHORTS[:2]:
        before = bits(server)
        with pytest.raises(ConnectionError, match="the cohort was lost"):
            server.step(breaks_off(updates), population=POPULATION)
        assert bits(server) == before
        server.step(updates, population=POPULATION)
    undisturbed = Server(MODEL, **{role: make(role, name)})
    run(undisturbed, COHORTS[:2])
    assert bits(server) == bits(undisturbed)


@pytest.mark.parametrize(("role", "name"), ROWS)
def test_a_skipped_round_changes_nothing(role: str, name: str):
    server = Server(MODEL, min_clients=6, **{role: make(role, name)})
    server.step(COHORTS[0], population=POPULATION)
    before = bits(server)
    record = server.step(COHORTS[1][:6], population=POPULATION)
    assert record.status == "skipped"
    assert record.reason
    assert record.reason.startswith("4 of 6 updates were accepted, 6 are needed")
    assert bits(server) == before
    json.dumps(record.to_dict(), allow_nan=False)


@pytest.mark.parametrize(("role", "name"), ROWS)
def test_the_model_takes_the_state_back(role: str, name: str):
    server = Server(MODEL, **{role: make(role, name)})
    run(server, COHORTS)
    fresh = Awkward()
    fresh.load_state_dict(server.state)
    assert bits(fresh.state_dict()) == bits(dict(server.state))
    assert fresh(torch.ones(2, 5)).isfinite().all()
