"""The table of clients, against records made by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedglad import Server, Update
from fedglad.analysis import ClientSummary, clients
from fedglad.analysis.per_client import worst
from fedglad.records import Record, Round
from fedglad.runs import Run, RunError
from tests.report.made import record, write


def member(name: Any, weight: float, norm: float | None, loss: float | None, **more: Any) -> Any:
    squared = None if norm is None else norm**2
    return {"id": name, "weight": weight, "loss": loss, "sq_norm": squared, **more}


COHORTS: list[list[dict[str, Any]]] = [
    [  # norms 1, 2, 3, 12: the median is 2.5
        member(1, 0.25, 1.0, 1.0, trust=1.0),
        member(2, 0.25, 2.0, 2.0, trust=0.9),
        member("b", 0.25, 3.0, 3.0, trust=0.8, clipped=0.5),
        member(7, 0.25, 12.0, 4.0, trust=0.25, flags=["opposed", "boosted"]),
    ],
    [  # 100 is rejected, so the median is that of 2, 4 and 6
        member(1, 0.5, 2.0, None, trust=0.9),
        member(2, 0.0, 100.0, 5.0, rejected="its norm is 100"),
        member(3, 0.5, 6.0, 1.0, trust=0.4, flags=["drifting"]),
        member(7, 0.0, 4.0, 2.0, trust=0.2, flags=["opposed"], rejected="left out by Distrust"),
        member(None, 0.0, None, None, rejected="it cannot be read"),
    ],
    [member(7, 1.0, 0.0, 3.0, trust=0.6)],  # the median is 0: there is no ratio
]
RECORDS = [record(t, clients=cohort) for t, cohort in enumerate(COHORTS)]

EXPECTED = [
    # flagged in 2 of 3 rounds that judged it; norm ratios 12/2.5 and 4/4
    ClientSummary(
        id=7, rounds=3, share=(0.25 + 0 + 1) / 3, scores=(0.25, 0.2, 0.6), flagged=2,
        flags={"opposed": 2, "boosted": 1}, left_out=1, loss=3.0, norm=16 / 3,
        norm_ratio=(4.8 + 1) / 2,
    ),
    # 1 flag in 1 round, which is too few to be sure
    ClientSummary(
        id=3, rounds=1, share=0.5, scores=(0.4,), flagged=1, flags={"drifting": 1}, loss=1.0,
        norm=6.0, norm_ratio=1.5,
    ),
    # rejected in 1 of 2; norm ratios 2/2.5 and 100/4
    ClientSummary(
        id=2, rounds=2, share=0.125, scores=(0.9,), rejected=1, reason="its norm is 100",
        loss=3.5, norm=51.0, norm_ratio=(0.8 + 25) / 2,
    ),
    # nothing against these two: by their mean trust, 0.8 and 0.95
    ClientSummary(
        id="b", rounds=1, share=0.25, scores=(0.8,), clipped=1, loss=3.0, norm=3.0, norm_ratio=1.2
    ),
    ClientSummary(
        id=1, rounds=2, share=0.375, scores=(1.0, 0.9), loss=1.0, norm=1.5,
        norm_ratio=(0.4 + 0.5) / 2,
    ),
]  # fmt: skip


def close(found: ClientSummary, wanted: ClientSummary) -> bool:
    numbers = ("share", "loss", "norm", "norm_ratio")
    first, second = ({**vars(one), **dict.fromkeys(numbers)} for one in (found, wanted))
    same = [getattr(found, n) == pytest.approx(getattr(wanted, n)) for n in numbers]
    return first == second and all(same)


def test_every_number_of_every_client():
    found = clients(RECORDS)
    assert [client.id for client in found] == [client.id for client in EXPECTED]
    for one, wanted in zip(found, EXPECTED, strict=True):
        assert close(one, wanted), (one, wanted)
    assert (found[0].trust, found[0].mean_trust) == (0.6, pytest.approx(0.35))
    assert [client.to_look_at for client in found] == [True, False, False, False, False]
    assert found[0].doubt == "opposed in 2, boosted in 1 of 3 rounds"
    assert found[-1].doubt == ""


def test_a_folder_a_run_and_records_of_any_kind_give_the_same(tmp_path: Path):
    wanted = clients(RECORDS)
    folder = write(tmp_path, RECORDS)
    told = [Record("stepped", clients=cohort) for cohort in COHORTS]
    rounds = [Round(t, (), one) for t, one in enumerate(told)]
    for given in (folder, str(folder), Run(folder), Run(folder).read(), told, iter(rounds)):
        assert clients(given) == wanted
    with pytest.raises(RunError, match="there is no folder"):
        clients(tmp_path / "absent")


@pytest.mark.parametrize(
    ("judged", "flagged", "expected"),
    [(1, 1, False), (2, 1, True), (3, 1, False), (3, 2, True), (6, 3, True), (7, 3, False)],
)
def test_who_is_to_look_at(judged: int, flagged: int, expected: bool):
    flags = [{"flags": ["copied"]}] * flagged + [{}] * (judged - flagged)
    cohorts = [[member(1, 1.0, 1.0, 1.0, trust=0.5, **more)] for more in flags]
    (found,) = clients([record(t, clients=cohort) for t, cohort in enumerate(cohorts)])
    assert found.to_look_at == expected


def test_old_records_have_no_trust_and_no_flags():
    found = clients([record(0), record(1)])
    assert [client.id for client in found] == [0, 1]
    assert all(client.trust is client.mean_trust is None for client in found)
    assert not any(client.scores or client.flags or client.to_look_at for client in found)
    assert [client.norm_ratio for client in found] == pytest.approx([0.8, 1.2])  # 2 and 3 over 2.5


def test_nobody():
    assert clients([]) == []
    assert clients([record(0, clients=[member(None, 1.0, 1.0, 1.0, trust=0.1)])]) == []
    assert clients([Record("skipped", "nobody came")]) == []


def test_of_a_servers_own_records():
    server = Server({"w": torch.zeros(40)})
    base = torch.linspace(0.5, 1.5, 40)
    told: list[Record] = []
    for t in range(3):
        noise = [0.1 * torch.sin(torch.arange(40.0) * (k + 2) + t) for k in range(6)]
        signs = [1.0] * 5 + [-1.0]
        told.append(
            server.step(
                Update({"w": sign * (base + n)}, client=f"site-{k}", loss=1.0)
                for k, (sign, n) in enumerate(zip(signs, noise, strict=True))
            )
        )
    first, *others = clients(told)
    assert (first.id, first.doubt) == ("site-5", "opposed in 3 of 3 rounds")
    assert not any(client.flagged for client in others)


def test_damaged_trust_costs_itself_alone(tmp_path: Path):
    bad = [{"trust": 2}, {"trust": "x"}, {"flags": "opposed!"}, {"flags": ["<b>"]}, {"clipped": []}]
    good = {"trust": 0.5, "flags": ["opposed", "copied"], "clipped": 0.25}
    cohort = [member(k, 0.1, 1.0, 1.0, **{**good, **one}) for k, one in enumerate([{}, *bad])]
    view = Run(write(tmp_path, [record(0, clients=cohort)])).read()
    assert view.missing[0] == "'clients' is damaged in round 1: what can be read is shown"
    first, *rest = view.rounds[0]["clients"]
    assert {key: first[key] for key in good} == good
    for one, damaged in zip(rest, bad, strict=True):
        wanted = {key: value for key, value in good.items() if key not in damaged}
        assert {key: one[key] for key in good if key in one} == wanted
    assert len(clients(view)) == 6


def test_it_needs_no_torch(tmp_path: Path):
    folder = write(tmp_path, RECORDS)
    script = (
        "import sys, json; from fedglad.analysis import clients\n"
        f"print(json.dumps([[c.id for c in clients({str(folder)!r})], 'torch' in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout) == [[7, 3, 2, "b", 1], False], done.stderr


def test_of_many_clients_the_worst_are_named():
    def often(name: int, flagged: int) -> ClientSummary:
        scores = (0.1,) * 6
        return ClientSummary(
            id=name, rounds=6, scores=scores, flagged=flagged, flags={"opposed": flagged}
        )

    named = ", ".join(f"{k} (opposed in 4 of 6 rounds)" for k in range(5))
    many = [often(k, 4) for k in range(8)] + [often(8, 2)]
    assert worst(many, 5) == f"{named} and 3 more"
    assert worst(many[:5], 5) == named
    assert worst([often(1, 2)], 5) == ""
