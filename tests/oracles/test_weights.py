"""Weightings by hand: equal, by samples, FedAdp, inverse distance."""

import math
from typing import Any

import pytest
import torch

from fedglad import Record, Server, Update
from fedglad.filters import MultiKrum
from fedglad.weights import Equal, FedAdp, InverseDistance, Samples


def updates(**clients: tuple[list[float], float]) -> list[Update]:
    return [
        Update({"w": torch.tensor(g)}, client=name, weight=n) for name, (g, n) in clients.items()
    ]


def shares(record: Record) -> list[float]:
    return [c["weight"] for c in record.clients]


def one_dimension(weighting: Samples, points: list[float], n: list[float]) -> tuple[float, Record]:
    server = Server({"w": torch.zeros(1)}, weighting=weighting)
    pairs = enumerate(zip(points, n, strict=True))
    record = server.step(
        [Update({"w": torch.tensor([float(x)])}, client=k, weight=w) for k, (x, w) in pairs]
    )
    return -float(server.params["w"]), record


@pytest.mark.parametrize("weighting", [None, Samples()])
def test_by_samples_is_the_default(weighting: Any):
    # (1·1 + 3·5)/4 = 4
    mean, record = one_dimension(weighting, [1, 5], [1, 3])
    assert mean == 4
    assert shares(record) == [0.25, 0.75]


def test_equal_weights_know_no_samples():
    # (1 + 5)/2 = 3; Σw‖g‖² = 13, ‖ḡ‖² = 9
    mean, record = one_dimension(Equal(), [1, 5], [1, 3])
    assert mean == 3
    assert shares(record) == [0.5, 0.5]
    assert record.gsi["w"] == pytest.approx(math.sqrt(13 / 9))


def f(phi: float, a: float = 5.0) -> float:
    return a * (1 - math.exp(-math.exp(-a * (phi - 1))))


def test_fedadps_curve():
    # f(0) = 5(1 - e^-e^5) = 5, f(1) = 5(1 - 1/e) = 3.1606, f(π/2) = 5(1 - e^-e^-2.854) = .28
    assert f(0) == pytest.approx(5)
    assert f(1) == pytest.approx(3.1606, abs=1e-4)
    assert f(math.pi / 2) == pytest.approx(0.2800, abs=1e-3)


def test_fedadp_weighs_by_the_angle_to_the_mean():
    # n = 3, 1; g = (1, 0), (0, 1): ḡ = (.75, .25), φ = atan(1/3) = .32175, atan(3) = 1.24905
    # f = 5.0000, 1.2507; weights ∝ 3e^5 = 445.24 and e^1.2507 = 3.4928: .99222, .00778
    server = Server({"w": torch.zeros(2)}, weighting=FedAdp())
    record = server.step(updates(a=([1.0, 0.0], 3), b=([0.0, 1.0], 1)))
    assert shares(record) == pytest.approx([0.99222, 0.00778], abs=1e-5)
    assert (-server.params["w"]).tolist() == pytest.approx([0.99222, 0.00778], abs=1e-5)
    # Σw‖g‖² = 1, ‖ḡ‖² = .99222² + .00778²: the indicator sees the new weights
    assert record.gsi["w"] == pytest.approx(1 / math.hypot(0.99222, 0.00778), abs=1e-5)


def test_fedadp_averages_a_clients_angles_over_its_participations():
    # round 0: a, b as above: φ_b = atan(3)
    # round 1: b = (1, 0), c = (0, 1), n = 1: both at π/4; φ̃_b = (1.24905 + .78540)/2 = 1.01722
    #   f_b = 3.0024, f_c = f(π/4) = 4.7315; share of b = 1/(1 + e^1.7291) = .1507
    # round 2: b, d likewise: φ̃_b = (1.24905 + 2·.78540)/3 = .93995, f_b = 3.7041
    #   share of b = 1/(1 + e^1.0274) = .2636
    server = Server({"w": torch.zeros(2)}, weighting=FedAdp())
    server.step(updates(a=([1.0, 0.0], 3), b=([0.0, 1.0], 1)))
    second = server.step(updates(b=([1.0, 0.0], 1), c=([0.0, 1.0], 1)))
    third = server.step(updates(b=([1.0, 0.0], 1), d=([0.0, 1.0], 1)))

    quarter, known = math.pi / 4, math.atan(3)
    for record, phi, by_hand in [
        (second, (known + quarter) / 2, 0.1507),
        (third, (known + 2 * quarter) / 3, 0.2636),
    ]:
        share = 1 / (1 + math.exp(f(quarter) - f(phi)))
        assert share == pytest.approx(by_hand, abs=1e-4)
        assert shares(record) == pytest.approx([share, 1 - share], abs=1e-5)


def test_fedadp_with_another_alpha():
    # alpha 1: f = 1 - e^-e^(1-φ): φ = .32175 gives .8605, φ = 1.24905 gives .5414
    # weights ∝ 3e^.8605 = 7.093, e^.5414 = 1.718
    server = Server({"w": torch.zeros(2)}, weighting=FedAdp(alpha=1))
    record = server.step(updates(a=([1.0, 0.0], 3), b=([0.0, 1.0], 1)))
    raw = [3 * math.exp(f(math.atan(1 / 3), 1)), math.exp(f(math.atan(3), 1))]
    assert raw == pytest.approx([7.093, 1.718], abs=2e-3)
    assert shares(record) == pytest.approx([w / sum(raw) for w in raw], abs=1e-5)


def test_fedadp_nearly_silences_a_client_that_points_backwards():
    # g = 1, 1, 1, -1: ḡ = 1/2, angles 0, 0, 0, π; f(0) = 5, f(π) = 5(1 - e^-e^-10.7) = 1.1e-4
    # share of the last = 1/(1 + 3e^5) = .00224; mean = 1 - 2·.00224
    mean, record = one_dimension(FedAdp(), [1, 1, 1, -1], [1] * 4)
    last = 1 / (1 + 3 * math.exp(5))
    assert shares(record)[3] == pytest.approx(last, rel=1e-3)
    assert mean == pytest.approx(1 - 2 * last, rel=1e-5)


def test_fedadp_needs_to_know_the_client():
    server = Server({"w": torch.zeros(1)}, weighting=FedAdp())
    known = Update({"w": torch.ones(1)}, client=1)
    record = server.step([{"w": torch.ones(1)}, known])
    assert [c.get("rejected") for c in record.clients] == ["FedAdp needs Update(client=...)", None]


def test_fedadp_forgets_a_skipped_round():
    # b's angle in the skipped round would have been 0 or π/4, not atan(3)
    server = Server({"w": torch.zeros(2)}, weighting=FedAdp(), min_clients=2)
    before = server.state_dict()["weighting"]
    assert not server.step(updates(b=([1.0, 0.0], 1))).stepped
    assert server.state_dict()["weighting"] == before


def test_fedadp_forgets_what_the_filter_left_out():
    # MultiKrum on 0, 1, 3, 7, 40 leaves 40 out: its angle is not remembered
    server = Server({"w": torch.zeros(1)}, filter=MultiKrum(f=1), weighting=FedAdp(), guard=None)
    server.step(
        [Update({"w": torch.tensor([x])}, client=str(x)) for x in (0.5, 1.0, 3.0, 7.0, 40.0)]
    )
    assert len(server.state_dict()["weighting"]["state"]) == 4


@pytest.mark.parametrize("n", [[1, 1, 1], [1, 10, 100]])
def test_inverse_distance_to_the_mean_model(n: list[float]):
    # 0, 1, 5: mean 2, distances 2, 1, 3; weights ∝ 1/2, 1, 1/3, that is 3, 6, 2 of 11
    # mean = (6 + 10)/11; the numbers of samples do not enter
    mean, record = one_dimension(InverseDistance(), [0, 1, 5], n)
    assert shares(record) == pytest.approx([3 / 11, 6 / 11, 2 / 11], rel=1e-5)
    assert mean == pytest.approx(16 / 11, rel=1e-5)


def test_a_client_at_the_mean_itself_takes_nearly_all():
    # 1, 2, 3: distances 1, 0, 1; weights ∝ 1, 1e12, 1
    mean, record = one_dimension(InverseDistance(), [1, 2, 3], [1, 1, 1])
    assert shares(record) == pytest.approx([1e-12, 1, 1e-12])
    assert mean == pytest.approx(2, rel=1e-6)


def test_inverse_distance_over_several_tensors():
    # a = 0, 0, 6 and b = 0, 0, 8: mean (2, 8/3), distances 10/3, 10/3, 20/3; weights 2, 2, 1 of 5
    server = Server({"a": torch.zeros(1), "b": torch.zeros(1)}, weighting=InverseDistance())
    points = [(0.0, 0.0), (0.0, 0.0), (6.0, 8.0)]
    record = server.step([{"a": torch.tensor([a]), "b": torch.tensor([b])} for a, b in points])
    assert shares(record) == pytest.approx([0.4, 0.4, 0.2], rel=1e-5)


def test_inverse_distance_of_equal_updates_is_equal():
    # all distances are 0: 1e12 each
    mean, record = one_dimension(InverseDistance(), [2, 2, 2, 2], [1, 2, 3, 4])
    assert shares(record) == pytest.approx([0.25] * 4)
    assert mean == 2
