"""Central differential privacy: the noise, the clip, what counts, and ε by an accountant.

Tests of whole servers need dp-accounting, without which a server with privacy cannot be made; what
a round does with the updates, and every refusal, is tested without it.
"""

import copy
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats  # pyright: ignore[reportMissingTypeStubs]

from fedglad import Guard, Server, Update
from fedglad.adapters import Fixed, Glad
from fedglad.averages import EMA
from fedglad.clients import FedProx, FedRep, Plain, Scaffold
from fedglad.core.checkpoint import CheckpointError
from fedglad.estimators import VARP
from fedglad.filters import NormClip
from fedglad.optimizers import REGISTRY as OPTIMIZERS
from fedglad.optimizers import SGD, FedEve, Momentum
from fedglad.privacy import REGISTRY, Central, NoPrivacy, epsilon, text
from fedglad.records import Failure, Record
from fedglad.rng import stream
from fedglad.samplers import Scripted, Uniform
from fedglad.server.compatibility import refuse_privacy
from fedglad.server.private import noise, shortened, take_private
from fedglad.transforms import Quantise, TopK
from fedglad.trust import Trust
from fedglad.weights import Equal, Samples

needs_accountant = pytest.mark.skipif(
    find_spec("dp_accounting") is None, reason="dp-accounting is not installed"
)
OPEN: dict[str, Any] = {"weighting": Equal(), "guard": None, "trust": None}


def plain(model: Any) -> Server:
    """A server whose intake takes a round, as that of a private one would."""
    return Server(model, **OPEN)


def mean_of(
    server: Server, updates: list[Any], privacy: Central, cohort: int, k: int = 0
) -> np.ndarray:
    """The noised mean of a round."""
    intake = server.intake(server._total)
    take_private(intake, iter(updates), privacy, cohort, stream(1, "test", k))
    return np.concatenate(
        [view.flatten() for view in server.layout.views(intake.total.flat).values()]
    )


def test_the_noise_is_normal_with_the_deviation_it_says():
    """σC/r = 3 · 0.5/10 = 0.15 in every coordinate, about the mean of nothing, which is 0. Of n
    values the mean has the deviation 0.15/√n, and the variance that of 0.15² √(2/n)."""
    server, privacy, n = (
        plain({"a": torch.zeros(300, 100), "b": torch.zeros(7)}),
        Central(clip=0.5, noise=3.0),
        30_007,
    )
    drawn = mean_of(server, [Failure("x", "gone")], privacy, cohort=10)
    deviation = privacy.deviation(10)
    assert deviation == pytest.approx(0.15, rel=1e-12)
    assert len(drawn) == n
    assert abs(drawn.mean()) < 4 * deviation / math.sqrt(n)
    assert abs(drawn.var() / deviation**2 - 1) < 4 * math.sqrt(2 / n)
    assert stats.kstest(drawn / deviation, "norm").pvalue > 0.01
    # independent from coordinate to coordinate, and from round to round
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 4 / math.sqrt(n)
    other = mean_of(server, [Failure("x", "gone")], privacy, cohort=10, k=1)
    assert abs(np.corrcoef(drawn, other)[0, 1]) < 4 / math.sqrt(n)


def test_the_noise_is_added_to_the_mean_of_clipped_updates_by_hand():
    """C = 5: (3, 4) stays, (6, 8) becomes (3, 4), (0, 1) stays; one fails. Their sum over the fixed
    r = 4 is (6, 9)/4, and the same noise as alone is on top of it."""
    server, privacy = plain({"w": torch.zeros(2, dtype=torch.float64)}), Central(clip=5.0)
    updates = [
        Update({"w": np.array(g)}, weight=w)
        for g, w in (([3.0, 4.0], 1), ([6.0, 8.0], 99), ([0.0, 1.0], 7))
    ]
    made = mean_of(server, [*updates, Failure("x", "gone")], privacy, cohort=4)
    alone = mean_of(server, [], privacy, cohort=4)
    assert made - alone == pytest.approx([1.5, 2.25], rel=1e-12)
    assert np.array_equal(alone, noise(server.layout, stream(1, "test", 0))[:2].numpy() * 5.0 / 4)


def test_what_is_rejected_counts_as_nothing_and_the_divisor_stays():
    server, privacy = plain({"w": torch.zeros(2, dtype=torch.float64)}), Central(clip=5.0)
    good, bad = {"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([math.nan, 0.0])}
    intake = server.intake(server._total)
    intake.once = True
    updates = [
        Update(good, client=1),
        Update(bad, client=2),
        Update(good, client=1),
        {"v": good["w"]},
    ]
    take_private(intake, iter(updates), privacy, 4, stream(1, "test", 0))
    made = server.layout.views(intake.total.flat)["w"].numpy().copy()
    assert made - mean_of(server, [], privacy, 4) == pytest.approx([0.5, 0.0], rel=1e-12)
    reasons = [entry.get("rejected", "none") for entry in intake.entries]
    assert reasons[:3] == ["none", "'w' holds NaN or inf", "the client has sent an update already"]
    assert reasons[3] == "delta has an extra tensor 'v'"
    assert intake.entries[0]["weight"] == 0.25


@pytest.mark.parametrize("size", [1, 17, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clipped_update_is_as_long_as_it_may_be_to_the_last_bits(size: int, dtype: torch.dtype):
    vector = torch.from_numpy(stream(1, "test", size).standard_normal(size)).to(dtype) * 1e3
    clipped, factor = shortened(vector, 0.1)
    assert float(clipped.norm()) == pytest.approx(0.1, rel=1e-12)
    assert factor < 1
    short, factor = shortened(vector, 1e9)
    assert factor == 1
    assert torch.equal(short, vector.double())


def test_more_updates_than_were_drawn_are_an_error_and_nothing_has_changed():
    server = plain({"w": torch.zeros(1)})
    with pytest.raises(ValueError, match="more than 1 updates came for a cohort of 1"):
        mean_of(server, [{"w": torch.ones(1)}] * 2, Central(), cohort=1)
    assert server.round == 0


def test_noise_is_not_put_where_no_parameter_is():
    server = plain({"a": torch.zeros(3), "b": torch.zeros(5)})
    drawn = noise(server.layout, stream(1, "test", 0))
    assert int((drawn != 0).sum()) == 8
    assert not bool(drawn[server.layout.padding].any())


# Wang, Balle & Kasiviswanathan 2019, Theorem 27, for order α = 2, where it can be done by hand:
#   (α − 1) ε' = log(1 + q² C(2, 2) min(4 (e^{ε(2)} − 1), 2 e^{ε(2)})),  ε(2) = 2/(2s²) = 1/s²,
# s the deviation over the sensitivity, which for replaced clients is σC/2C = σ/2.


@needs_accountant
@pytest.mark.parametrize(("sigma", "r", "n"), [(4.0, 10, 1000), (2.0, 5, 50), (8.0, 100, 1000)])
def test_a_round_costs_what_the_theorem_says_for_half_of_sigma(sigma: float, r: int, n: int):
    from fedglad.privacy import _of_a_round

    orders, divergences = _of_a_round(sigma, r, n)
    by_order = dict(zip(orders.tolist(), divergences.tolist(), strict=True))
    each = math.exp(1 / (sigma / 2) ** 2)
    expected = math.log(1 + (r / n) ** 2 * min(4 * (each - 1), 2 * each))
    assert by_order[2.0] == pytest.approx(expected, rel=1e-9)


@needs_accountant
def test_with_everybody_in_every_round_it_is_the_gaussian_mechanism():
    """ε'(α) = Tα/(2s²); ε = min over α of ε'(α) + log(1 − 1/α) − log(δα)/(α − 1) is at most what
    any of the orders gives, here α = 3: T = 5, s = σ/2 = 10."""
    made = Central(noise=20.0).epsilon(rounds=5, cohort=8, population=8)
    at_three = 5 * 3 / (2 * 10**2) + math.log(1 - 1 / 3) - math.log(1e-5 * 3) / 2
    assert 0 < made <= at_three
    exact = min(
        5 * a / 200 + math.log1p(-1 / a) - math.log(1e-5 * a) / (a - 1) for a in np.arange(2, 400)
    )
    assert made == pytest.approx(exact, rel=0.3)


@needs_accountant
def test_epsilon_is_the_accountants_own():
    import dp_accounting  # pyright: ignore

    module: Any = dp_accounting
    accountant = module.rdp.RdpAccountant(
        neighboring_relation=module.NeighboringRelation.REPLACE_ONE
    )
    for sigma, r, n, rounds in ((2.0, 5, 100, 30), (3.0, 10, 100, 7)):
        gaussian = module.GaussianDpEvent(sigma / 2)
        event = module.SampledWithoutReplacementDpEvent(
            source_dataset_size=n, sample_size=r, event=gaussian
        )
        accountant.compose(event, rounds)
    releases = {(2.0, 5, 100): 30, (3.0, 10, 100): 7}
    assert epsilon(releases, 1e-6) == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-9)
    assert Central(noise=2.0).epsilon(30, 5, 100) < Central(noise=2.0).epsilon(31, 5, 100)
    assert Central(noise=3.0).epsilon(30, 5, 100) < Central(noise=2.0).epsilon(30, 5, 100)
    assert Central(noise=2.0).epsilon(30, 5, 200) < Central(noise=2.0).epsilon(30, 5, 100)


def private(**settings: Any) -> Server:
    given: dict[str, Any] = {"privacy": Central(clip=1.0, noise=2.0), **OPEN, **settings}
    return Server({"w": torch.zeros(3)}, **given)


def play(server: Server, rounds: int, start: int = 0) -> list[Record]:
    return [
        server.step(
            [Update({"w": torch.ones(3) * (k + 1)}, client=k) for k in range(2)],
            cohort=3,
            population=30,
            noise=stream(5, "test", t),
        )
        for t in range(start, start + rounds)
    ]


@needs_accountant
def test_a_server_outside_of_the_simulator():
    server = private()
    records = play(server, 2)
    spent = [Central(noise=2.0).epsilon(t, 3, 30) for t in (1, 2)]
    assert [record.epsilon for record in records] == spent
    assert server.epsilon == spent[1]
    assert private().epsilon == 0
    assert Server({"w": torch.zeros(1)}).epsilon is None
    for record in records:
        assert (record.gsi, record.scale, record.gsi_all, record.statistics) == ({}, {}, None, None)
        assert record.to_dict()["epsilon"] == record.epsilon
    # without a generator nobody can foresee the noise
    one, other = private(), private()
    for server in (one, other):
        server.step([], cohort=3, population=30)
        assert server.round == 1  # there is always a round: that none came would tell as well
    assert not torch.equal(one.state["w"], other.state["w"])


@needs_accountant
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_by_the_noised_mean_alone(name: str):
    """Two cohorts whose clipped sums are equal are one to it."""
    if name == "fedeve":
        return
    made = [private(optimizer=OPTIMIZERS[name](), average=None) for _ in range(2)]
    for server, sums in zip(made, ([0.25, 0.25], [0.5]), strict=True):
        updates = [{"w": torch.full((3,), value)} for value in sums]
        for t in range(3):
            server.step(updates, cohort=4, population=40, noise=stream(1, "test", t))
    assert torch.equal(made[0].state["w"], made[1].state["w"])


@needs_accountant
def test_it_is_saved_and_goes_on_to_the_same_bits(tmp_path: Path):
    settings: dict[str, Any] = {"optimizer": Momentum(), "average": EMA()}
    whole, first = private(**settings), private(**settings)
    records = play(whole, 4)
    play(first, 2)
    first.save(tmp_path / "state")
    again = Server.load(tmp_path / "state", {"w": torch.zeros(3)})
    assert again.privacy == first.privacy
    assert play(again, 2, start=2)[-1].epsilon == records[-1].epsilon
    assert torch.equal(again.state["w"], whole.state["w"])
    saved = first.state_dict()
    with pytest.raises(CheckpointError, match="saved with privacy, and its ε would not be known"):
        Server({"w": torch.zeros(3)}, **settings, **OPEN).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="saved without privacy"):
        first.load_state_dict(Server({"w": torch.zeros(3)}, **settings, **OPEN).state_dict())
    for bad in ([2.0, 3, 30, -1], [2.0, 40, 30, 1], [math.nan, 3, 30, 1], [2.0, 3]):
        broken = copy.deepcopy(saved)
        broken["privacy"]["releases"] = [bad]
        with pytest.raises((CheckpointError, ValueError)):
            first.load_state_dict(broken)
    assert first.epsilon == records[1].epsilon


@needs_accountant
@pytest.mark.parametrize(
    "given", [{}, {"cohort": 3}, {"population": 30}, {"cohort": 31, "population": 30}]
)
def test_a_step_must_know_the_cohort_and_the_population(given: dict[str, Any]):
    with pytest.raises(
        ValueError, match=r"must know r and N, got cohort=.*step\(updates, cohort=r"
    ):
        private().step([], **given)


@needs_accountant
def test_sums_alone_are_refused():
    from fedglad.server import Sums

    sums = Sums(total={"w": torch.zeros(3)}, sum_sq={"w": 0.0}, weight=1.0, count=1)
    with pytest.raises(
        ValueError, match="Central clips each update, and there are only their sums"
    ):
        private().step_sums(sums)


@pytest.mark.skipif(find_spec("dp_accounting") is not None, reason="dp-accounting is installed")
def test_without_an_accountant_a_private_server_is_refused_before_anything_is_done():
    with pytest.raises(ValueError, match=r"not installed: pip install 'fedglad\[privacy\]'"):
        private()


class Wider(Uniform):
    """Somebody's own sampler, which may draw in any way."""


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"adapter": Glad()}, "Glad scales the step by what the updates are.*adapter.name = none"),
        ({"filter": NormClip()}, "NormClip treats a client by what others.*filter.name = none"),
        ({"weighting": Samples()}, "Samples gives some clients more.*weighting.name = equal"),
        ({"server": FedEve()}, "FedEve steps by how much the updates disagree.*another server.n"),
        ({"estimator": VARP()}, "VARP keeps single updates.*estimator.name = none"),
        ({"guard": Guard()}, "the guard cuts and rejects a client by.*guard.name = none"),
        ({"trust": Trust()}, "Trust judges clients by each other's.*trust.name = none"),
        (
            {"client": Scaffold()},
            "Scaffold sends, or keeps with clients, more.*client.name = plain",
        ),
        (
            {"client": FedRep()},
            "FedRep keeps some parameters with each client.*client.personal that keep nothing back",
        ),
        ({"transform": TopK()}, "TopK sends later what is left.*transform.name = none or quantise"),
        (
            {"sampler": Scripted(cohorts={"0": [1]})},
            "every client is as likely.*sampler.name = uni",
        ),
        ({"sampler": Wider(seed=1)}, "every client is as likely as any other"),
        ({"sampler": Uniform(seed="run", availability="markov")}, "every client is as likely as"),
        ({"sampler": Uniform()}, "the cohorts of sampler.seed = round are the same.*seed = run"),
        ({"method": lambda *_: None}, "the method's server half reads what clients send.*= None"),
        ({"distances": True}, "distances tell how far single updates are.*distances = False"),
        ({"min_clients": 2}, "whether a round is skipped would tell.*min_clients = 1"),
        ({"buffers": ["bn.running_mean"]}, "buffers, 'bn.running_mean' among.*without them"),
        ({"validates": True}, "the validation set is made of clients' own.*data.validation = 0"),
    ],
)
def test_what_would_make_epsilon_wrong_is_refused(part: dict[str, Any], message: str):
    good: dict[str, Any] = {
        "adapter": Fixed(value=0.5),
        "filter": Server({"w": torch.zeros(1)}).filter,
        "weighting": Equal(),
        "server": SGD(),
        "client": FedProx(),
        "sampler": Uniform(seed="run"),
        "transform": Quantise(),
    }
    refuse_privacy(**good)
    with pytest.raises(ValueError, match=message):
        refuse_privacy(**good | part)


def test_all_that_is_to_be_set_is_in_the_message():
    with pytest.raises(ValueError, match=r"use weighting.name = equal; also guard.name = none, tr"):
        Server({"w": torch.zeros(1)}, privacy=Central())
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    with pytest.raises(ValueError, match=r"buffers, '1.running_mean' among them, are averages of"):
        Server(model, privacy=Central(), **OPEN)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"clip": 0.0}, "Central(clip=0.0): must be greater than 0, and below 1e12"),
        ({"clip": math.inf}, "Central(clip=inf): must be"),
        ({"noise": 0.0}, "Central(noise=0.0): must be from 1e-3 to 1e6"),
        ({"noise": math.nan}, "Central(noise=nan): must be"),
        ({"delta": 0.0}, "Central(delta=0.0): must be greater than 0, and less than 1"),
        ({"delta": 1.0}, "Central(delta=1.0): must be"),
    ],
)
def test_a_bad_setting_is_refused(bad: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        Central(**bad)


def test_rows_are_settings_and_epsilon_is_never_shown_as_less_than_it_is():
    assert [*REGISTRY.values()] == [NoPrivacy, Central]
    assert hash(Central()) == hash(Central())
    assert Plain().remembers == ()
    for value in (0.001234, 0.5, 3.14159, 99.99, 1234.5):
        assert float(text(value)) >= value
        assert float(text(value)) == pytest.approx(value, rel=0.011)
    assert (text(0.0), text(math.inf)) == ("0", "inf")
