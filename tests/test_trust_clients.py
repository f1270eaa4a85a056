"""Trust in clients: each flag's arithmetic by hand, what never happens, what is kept of them."""

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedglad.filters import Distrust
from fedglad.records import FLAGS
from fedglad.trust import Client, History, Kept, Seen, Trust, Verdict


def see(
    sample: Any,
    clients: Sequence[Client] | None = None,
    norms: Any = None,
    losses: Any = None,
) -> Seen:
    """A round whose norms are those of the sample, and whose losses are equal."""
    sample = np.asarray(sample, np.float32)
    r = len(sample)
    return Seen(
        clients=list(range(r)) if clients is None else clients,
        norms=np.linalg.norm(sample.astype(float), axis=1) if norms is None else norms,
        losses=np.ones(r) if losses is None else losses,
        sample=sample,
    )


def by_client(verdicts: Sequence[Verdict]) -> dict[Client, Verdict]:
    return {verdict.client: verdict for verdict in verdicts}


# ------------------------------------------------------------------------------------- arithmetic

THREE = [[1, 0], [0.6, 0.8], [-1, 0]]  # a, b, d: cosines ab = .6, ad = −1, bd = −.6


def test_agreement_and_score_by_hand():
    # a: c|c| are .36 and −1, c⁴ are .1296 and 1: −.64/√(1.1296 + .01).  b: .36 − .36 = 0.
    # d: (−1 − .36)/√1.1396 = −1.27…, so e² = 1.8496/1.1396 and the score 1.1396/(1.1396 + 1.8496).
    verdicts, _ = Trust().judge(see(THREE, "abd"), Kept())
    root = math.sqrt(1.1396)
    assert [v.agreement for v in verdicts] == pytest.approx([-0.64 / root, 0, -1.36 / root])
    assert [v.flags for v in verdicts] == [(), (), ("opposed",)]
    scores = [1.1396 / (1.1396 + 0.4096), 1, 1.1396 / (1.1396 + 1.8496)]
    assert [v.score for v in verdicts] == pytest.approx(scores)
    verdicts, _ = Trust(opposed=1.3).judge(see(THREE, "abd"), Kept())
    assert [v.flags for v in verdicts] == [(), (), ()]


def test_evidence_adds_up_over_a_clients_rounds():
    # After the round above: a has −.64 and 1.1296, d has −1.36 and 1.1296.
    # Now a = (1, 0) and d = (0, 1) meet each other (cosine 0) and what is kept of b (.6 and .8):
    # a adds .36 and .1296, d adds .64 and .4096. With memory ½, n = 1.5:
    # a: (−.32 + .36)/√(.5648 + .1296 + .01);  d: (−.68 + .64)/√(.5648 + .4096 + .01).
    trust = Trust(memory=0.5)
    _, kept = trust.judge(see(THREE, "abd"), Kept())
    verdicts, kept = trust.judge(see([[1, 0], [0, 1]], "ad"), kept)
    expected = [0.04 / math.sqrt(0.7044), -0.04 / math.sqrt(0.9844)]
    assert [v.agreement for v in verdicts] == pytest.approx(expected, abs=1e-3)  # .6 as float16
    assert list(kept.clients) == ["b", "a", "d"]
    history = History(rounds=2, flagged=0, n=1.5, signed=0.04, fourths=0.6944)
    assert kept.history("a") == pytest.approx(history, abs=1e-3)
    assert kept.history("d").flagged == 1


def test_a_turned_update_is_the_opposite_of_those_that_hold_the_same():
    # Two classes that have nothing in common; the last client holds the first and turns it round.
    # It meets −1 twice and 0 twice: −2/√2.01. The honest two of its class meet +1 and −1: 0.
    # Those of the other class meet each other: 1/√1.01.
    rows = [[1, 0, 0], [1, 0, 1e-3], [0, 1, 0], [0, 1, 1e-3], [-1, 0, 0]]
    verdicts, _ = Trust().judge(see(rows), Kept())
    assert [v.flags for v in verdicts] == [(), (), (), (), ("opposed",)]
    expected = [0, 0, 1 / math.sqrt(1.01), 1 / math.sqrt(1.01), -2 / math.sqrt(2.01)]
    assert [v.agreement for v in verdicts] == pytest.approx(expected, abs=1e-3)


def test_one_opposite_alone_flags_nobody():
    verdicts, _ = Trust().judge(see([[1, 0], [-1, 0]]), Kept())  # which of them is right?
    assert [v.agreement for v in verdicts] == pytest.approx([-1 / math.sqrt(1.01)] * 2)
    assert [v.flags for v in verdicts] == [(), ()]


def lengths(*logs: float) -> list[Verdict]:
    norms = np.exp(logs)
    return Trust().judge(see(np.eye(len(logs)), norms=norms), Kept())[0]


def test_boosted_by_hand():
    # The median of 1, 1, 1, 1, x is 1 and the shorter ones have no spread: from 3 on it is long.
    for x, flags in ((2.99, ()), (3.01, ("boosted",)), (10.0, ("boosted",))):
        verdict = lengths(0, 0, 0, 0, math.log(x))[-1]
        assert verdict.flags == flags
        assert verdict.length == pytest.approx(x)
        assert verdict.score == pytest.approx(1 / (1 + (math.log(x) / math.log(3)) ** 2))
    # Logarithms 0, 1, 2, 3, x: median 2, 10 and 30 % quantiles .4 and 1.2, so 4.5 · .8 = 3.6 above.
    assert lengths(0, 1, 2, 3, 5.5)[-1].flags == ()
    assert lengths(0, 1, 2, 3, 5.7)[-1].flags == ("boosted",)
    assert lengths(0, 0, 9)[-1].flags == ()  # three updates are too few


def test_drifting_by_hand():
    # Ten clients with n = 4 and A = 4/√(.99 + .01), so 4/√4 = 2 a round, and loss 0. The last comes
    # a fourth time; its sample meets zeros, so only n changes, to 4: A = 0 and loss 1/(4 + 1) = .2.
    # No spread among the others: the floors 1 and .1 count. 2/1 + .2/.1 = 4.
    usual = History(rounds=4, n=4.0, signed=4.0, fourths=0.99)
    records = [(k, usual) for k in range(10)]
    late = History(rounds=3, n=3.0, fourths=0.99, loss=1.0)
    kept = Kept.of([*records, ("x", late)], np.zeros((11, 2)))
    for threshold, flags in ((3.9, ("drifting",)), (4.1, ())):
        trust = Trust(memory=1.0, floor=0.1, drifting=threshold)
        (verdict,), _ = trust.judge(see([[1, 0]], ["x"]), kept)
        assert verdict.drift == pytest.approx(4)
        assert verdict.flags == flags
        assert verdict.score == pytest.approx(1 / (1 + (4 / threshold) ** 2))
    # A client that comes for the first time is not judged by it, nor anyone among fewer than ten.
    (verdict,), _ = Trust().judge(see([[1, 0]], ["new"]), kept)
    assert verdict.drift == 0
    few = Kept.of([*records[:8], ("x", late)], np.zeros((9, 2)))
    (verdict,), _ = Trust(memory=1.0, floor=0.1).judge(see([[1, 0]], ["x"]), few)
    assert verdict.drift == 0


def test_the_spread_of_the_others_counts():
    # A/√n of −2, −1, 0 … 8 (n = 4, so signed is twice as much). The first comes again: n is 5,
    # −4/√5. The best fifth of them begins (median − 20 % quantile of −A/√n)/.84 above the middle.
    made = [History(n=4.0, signed=2.0 * (k - 2), fourths=0.99) for k in range(11)]
    kept = Kept.of(list(enumerate(made)), np.zeros((11, 2)))
    (verdict,), _ = Trust(memory=1.0).judge(see([[1, 0]], [0]), kept)
    own = -4 / math.sqrt(5)
    middle, best = np.quantile([own, *range(-1, 9)], (0.5, 0.8))
    assert verdict.drift == pytest.approx((middle - own) / ((best - middle) / 0.84))


def test_copies_are_found_exactly():
    rows = [[1, 2], [1, 2], [1, 2.0000002], [2, 4], [1, 2]]
    verdicts, _ = Trust().judge(see(rows, norms=[3, 3, 3, 6, 3.1]), Kept())
    assert ["copied" in v.flags for v in verdicts] == [True, True, False, False, False]
    assert [verdicts[k].score for k in (0, 1)] == [0, 0]


def test_copies_are_one_voice_and_none_for_each_other():
    # x = y = (−1, 0), a = (1, 0), b = (1, 1)/√2. a meets x and y for half a voice each, and b:
    # (−½ − ½ + ½)/√(½ + ½ + ¼ + .01). x meets a and b, but not y: (−1 − ½)/√1.26.
    rows = [[1, 0], [math.sqrt(0.5)] * 2, [-1, 0], [-1, 0]]
    verdicts, _ = Trust().judge(see(rows, norms=[1, 1, 1, 1]), Kept())
    expected = [-0.5 / math.sqrt(1.26), *[-1.5 / math.sqrt(1.26)] * 2]
    assert [verdicts[k].agreement for k in (0, 2, 3)] == pytest.approx(expected)


def test_what_a_client_sent_before_is_no_voice_for_it():
    trust = Trust()
    _, kept = trust.judge(see([[1, 0]], ["a"]), Kept())
    (verdict,), _ = trust.judge(see([[-1, 0]], ["a"]), kept)
    assert verdict.agreement == 0
    verdicts, _ = trust.judge(see([[1, 0], [-1, 0]], ["a", "a"]), Kept())
    assert [v.agreement for v in verdicts] == [0, 0]


# ------------------------------------------------------------------------------------- properties

ROUND = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 8), st.integers(1, 5)),
    elements=st.sampled_from([0.0, 1.0, -1.0, 0.5, -2.0, 1e-30, 1e30, 3.0]),
)
LOSS = st.sampled_from([math.nan, math.inf, 0.0, -1.0, 1e-300, 0.5, 2.0, 1e300])


def agreements_by_definition(made: Sequence[Seen], trust: Trust) -> list[list[float]]:
    """A of every client in every round, one cosine at a time."""
    last: dict[Client, np.ndarray] = {}
    sums: dict[Client, tuple[float, float]] = {}
    found: list[list[float]] = []
    for seen in made:
        ids, rows, r = seen.clients, seen.directions.astype(float), len(seen.clients)
        keys = [(norm, row.tobytes()) for norm, row in zip(seen.norms, seen.sample, strict=True)]
        places = [k * r // min(r, trust.samples) for k in range(min(r, trust.samples))]
        absent = [row for client, row in last.items() if client not in ids]
        absent = absent[max(0, len(absent) - (trust.samples - len(places))) :]
        now: dict[Client, tuple[float, float]] = {}
        found.append([])
        for k in range(r):
            signed, fourths = 0.0, 0.0
            voices = [(1.0, row) for row in absent]
            for j in places:
                same_client = ids[j] is not None and ids[j] == ids[k]
                if j != k and not same_client and keys[j] != keys[k]:
                    voices.append((1 / [keys[i] for i in places].count(keys[j]), rows[j]))
            for voice, row in voices:
                c = float(row @ rows[k])
                signed, fourths = signed + voice * c * abs(c), fourths + voice * c**4
            if rows[k].any() and ids[k] in sums:
                before = sums[ids[k]]
                signed, fourths = signed + 0.8 * before[0], fourths + 0.8 * before[1]
            elif ids[k] in sums:
                signed, fourths = sums[ids[k]]
            found[-1].append(signed / math.sqrt(fourths + 0.01))
            if ids[k] is not None:
                now[ids[k]] = signed, fourths
        sums |= now
        for client in now:
            last.pop(client, None)
        for client in now:  # of several updates of one client in a round the last is kept
            place = max(k for k in range(r) if ids[k] == client)
            last[client] = rows[place].astype(np.float16).astype(float)
        last = dict(list(last.items())[max(0, len(last) - trust.samples) :])
    return found


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 9))
def test_agreement_is_what_its_definition_says(seed: int, r: int, samples: int):
    rng, trust, kept = np.random.default_rng(seed), Trust(samples=samples), Kept()
    made: list[Seen] = []
    for _ in range(4):  # few clients and few updates: ids that are unknown or come twice, copies
        ids = [int(k) if k else None for k in rng.integers(0, 12, r)]
        rows = rng.standard_normal((6, 5))[rng.integers(0, 6, r)]
        rows[rng.random(r) < 0.1] = 0
        made.append(see(rows, ids))
    for seen, expected in zip(made, agreements_by_definition(made, trust), strict=True):
        verdicts, kept = trust.judge(seen, kept)
        assert [v.agreement for v in verdicts] == pytest.approx(expected, abs=1e-4)


@given(ROUND, st.data())
def test_no_round_breaks_it(rows: np.ndarray, data: st.DataObject):
    r = len(rows)
    ids = data.draw(st.lists(st.sampled_from([None, 1, 2, "1", "x"]), min_size=r, max_size=r))
    losses = data.draw(st.lists(LOSS, min_size=r, max_size=r))
    norms = data.draw(st.lists(st.sampled_from([0.0, 1e-300, 1.0, 1e12]), min_size=r, max_size=r))
    kept = Kept()
    for _ in range(3):
        verdicts, kept = Trust().judge(see(rows, ids, norms, losses), kept)
        assert [v.client for v in verdicts] == ids
        for verdict in verdicts:
            assert 0 <= verdict.score <= 1
            assert bool(verdict.flags) == (verdict.score < 0.5)
            assert set(verdict.flags) <= set(FLAGS)
            assert abs(verdict.agreement) <= math.sqrt(7 * 3)  # voices a round, rounds
            assert math.isfinite(verdict.drift)
            assert math.isfinite(verdict.length)
        json.dumps(kept.to_json(), allow_nan=False)
        assert set(kept.clients) == set(ids) - {None}
        assert len(kept.samples) == len(kept.clients)


@given(st.integers(0, 2**32 - 1))
def test_the_order_of_the_clients_does_not_matter(seed: int):
    rng = np.random.default_rng(seed)
    trust, one, two = Trust(), Kept(), Kept()
    for _ in range(4):
        ids = rng.choice(12, 6, replace=False)
        rows, losses = rng.standard_normal((6, 8)), rng.uniform(0.1, 2, 6)
        order = rng.permutation(6)
        first, one = trust.judge(see(rows, ids.tolist(), losses=losses), one)
        again, two = trust.judge(see(rows[order], ids[order].tolist(), losses=losses[order]), two)
        there = by_client(again)
        for verdict in first:
            other = there[verdict.client]
            assert other.flags == verdict.flags
            assert other.score == pytest.approx(verdict.score, abs=1e-5)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-38, 1e-30, 1e-12, 1e-9, 1e12, 1e30, 1e37]))
def test_the_scale_of_ones_update_does_not_change_its_agreement(seed: int, scale: float):
    rows = np.random.default_rng(seed).standard_normal((5, 40)).astype(np.float32)
    scaled = rows.copy()
    scaled[2] *= np.float32(scale)
    (one, kept), (two, saved) = (Trust().judge(see(x), Kept()) for x in (rows, scaled))
    agreements = [v.agreement for v in one]
    assert [v.agreement for v in two] == pytest.approx(agreements, abs=1e-5)
    np.testing.assert_allclose(saved.samples, kept.samples, atol=5e-4)


def test_the_smallest_and_the_largest_numbers_have_a_direction():
    tiny, huge = np.float32(1.4e-45), np.float32(3.4e38)  # the least above 0, and nearly the most
    rows = [[tiny, 0], [-tiny, -tiny], [huge, -huge], [0, 0], [math.inf, 1], [math.nan, 1]]
    half = math.sqrt(0.5)
    expected = [[1, 0], [-half, -half], [half, -half], [0, 0], [0, 0], [0, 0]]
    np.testing.assert_allclose(see(rows, norms=[1] * 6).directions, expected, rtol=1e-6)


def rounds(
    seed: int, size: int = 300, clients: int = 30, t: int = 20, signal: float = 1.0, r: int = 8
) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
    """Clients of one kind: a common direction that turns slowly, and noise; ids, rows, losses."""
    rng = np.random.default_rng(seed)
    common, made = rng.standard_normal(size), list[tuple[list[int], np.ndarray, np.ndarray]]()
    for _ in range(t):
        common = 0.95 * common + 0.3 * rng.standard_normal(size)
        rows = signal * common + rng.standard_normal((r, size))
        rows *= np.exp(0.2 * rng.standard_normal((r, 1)))
        losses = np.exp(0.2 * rng.standard_normal(r))
        made.append((rng.choice(clients, r, replace=False).tolist(), rows, losses))
    return made


@pytest.mark.parametrize("signal", [0.5, 1.0, 3.0])
def test_an_honest_iid_cohort_raises_nothing(signal: float):
    for seed in range(25):
        kept = Kept()
        for ids, rows, losses in rounds(seed, signal=signal):
            verdicts, kept = Trust().judge(see(rows, ids, losses=losses), kept)
            assert [v for v in verdicts if v.flags] == []


@pytest.mark.parametrize("size", [500, 4000])
def test_clients_that_have_nothing_in_common_raise_nothing(size: int):
    for seed in range(5):
        kept = Kept()
        for ids, rows, losses in rounds(seed, size=size, signal=0.0, r=10):
            verdicts, kept = Trust().judge(see(rows, ids, losses=losses), kept)
            assert [v for v in verdicts if v.flags] == []


@pytest.mark.parametrize(
    ("flag", "factor"), [("opposed", -1.0), ("opposed", -0.5), ("boosted", 10.0)]
)
def test_a_fifth_of_bad_clients_is_found_and_nobody_else(flag: str, factor: float):
    for seed in range(10):
        kept = Kept()
        for ids, rows, losses in rounds(seed):
            rows *= np.where(np.array(ids)[:, None] < 6, factor, 1.0)
            verdicts, kept = Trust().judge(see(rows, ids, losses=losses), kept)
            honest = [v for v, k in zip(verdicts, ids, strict=True) if k >= 6]
            assert [v for v in honest if v.flags] == []
        flagged = {k for k in kept.clients if kept.history(k).flagged}
        assert flagged == {k for k in kept.clients if isinstance(k, int) and k < 6}


def test_nothing_moves_nobody_is_flagged():
    kept = Kept()
    for _ in range(5):
        verdicts, kept = Trust().judge(see(np.zeros((5, 3))), kept)
        assert [(v.score, v.flags, v.length) for v in verdicts] == [(1.0, (), 0.0)] * 5
    assert kept.history(0) == History(rounds=5)


def test_one_client_alone_is_like_the_others():
    kept = Kept()
    for _ in range(3):
        (verdict,), kept = Trust().judge(see([[1, 2, 3]]), kept)
        assert (verdict.score, verdict.flags) == (1.0, ())


def test_a_round_of_nobody_changes_nothing():
    _, kept = Trust().judge(see([[1, 2]]), Kept())
    verdicts, after = Trust().judge(see(np.zeros((0, 2))), kept)
    assert verdicts == []
    assert after.to_json() == kept.to_json()


def test_losses_that_are_no_numbers_say_nothing():
    rows = np.random.default_rng(3).standard_normal((4, 6))
    bad = [math.nan, math.inf, 0.0, -1.0]
    with_none, kept = Trust().judge(see(rows, losses=bad), Kept())
    assert with_none == Trust().judge(see(rows), Kept())[0]
    assert all(kept.history(client).loss == 0 for client in kept.clients)


def test_clients_without_an_id_are_judged_by_their_round_alone():
    verdicts, kept = Trust().judge(see(THREE, [None] * 3), Kept())
    assert [v.flags for v in verdicts] == [(), (), ("opposed",)]
    assert (kept.to_json(), len(kept.samples)) == ([], 0)


# ------------------------------------------------------------------------------------------- kept


@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_it_goes_on_from_saved_state_bit_for_bit_and_changes_no_input(seed: int, r: int):
    trust, kept, saved = Trust(samples=9), Kept(), Kept()
    for ids, rows, losses in rounds(seed, size=20, t=6, r=r):
        names: list[Client] = [k if k % 2 else f"node {k}" for k in ids]
        seen = see(rows, names, losses=losses)
        before = copy.deepcopy((kept.to_json(), kept.samples, vars(seen)))
        verdicts, after = trust.judge(seen, kept)
        for now, then in zip((kept.to_json(), kept.samples, vars(seen)), before, strict=True):
            np.testing.assert_equal(now, then)
        again, saved = trust.judge(seen, saved)
        assert again == verdicts
        assert saved.samples.tobytes() == after.samples.tobytes()
        kept = after
        saved = Kept.of(json.loads(json.dumps(saved.to_json())), saved.samples.copy())


GOOD = [2, 1, 1.8, -0.2, 0.3, 0.1]  # rounds, flagged, n, signed, fourths, loss


def with_(place: int, value: Any) -> list[Any]:
    return [[7, [value if k == place else number for k, number in enumerate(GOOD)]]]


@pytest.mark.parametrize(
    ("records", "samples", "message"),
    [
        ({"7": GOOD}, [[1, 0]], "clients are kept as a dict: must be a list"),
        ("[]", [[1, 0]], "kept as a str"),
        ([[7]], [[1, 0]], r"\[7\] is kept: must be a client's id and its history"),
        ([7], [[1, 0]], "7 is kept: must be a client's id"),
        ([[None, GOOD]], [[1, 0]], "client None is kept: must be an int or a string"),
        ([[True, GOOD]], [[1, 0]], "client True is kept"),
        ([[[1], GOOD]], [[1, 0]], r"client \[1\] is kept"),
        ([[7, GOOD], [7, GOOD]], [[1, 0]], "client 7 is kept twice"),
        ([[7, GOOD[:5]]], [[1, 0]], r"client 7 is kept with \[2, 1.*: must be 6 numbers"),
        ([[7, 3]], [[1, 0]], "client 7 is kept with 3: must be 6 numbers"),
        (with_(2, "1"), [[1, 0]], "client 7 is kept with n='1': must be a number"),
        (with_(2, None), [[1, 0]], "n=None: must be a number"),
        (with_(2, True), [[1, 0]], "n=True: must be a number"),
        (with_(2, -0.1), [[1, 0]], r"n=-0.1: must be from 0 to 1e\+15"),
        (with_(2, math.nan), [[1, 0]], "n=nan: must be from 0"),
        (with_(5, math.inf), [[1, 0]], r"loss=inf: must be from -1e\+15"),
        (with_(0, 10**400), [[1, 0]], "rounds=1000"),
        (with_(1, 3), [[1, 0]], "flagged=3 and rounds=2"),
        (with_(3, -1e16), [[1, 0]], r"signed=-1e\+16: must be from -1e\+15"),
        (with_(4, -0.4), [[1, 0]], "fourths=-0.4: must be from 0"),
        ([[7, GOOD]], [1, 0], r"samples are kept as float64 of shape \(2,\)"),
        ([[7, GOOD]], [["1", "0"]], "must be rows of floating-point numbers"),
        ([[7, GOOD]], [[1, 0], [0, 1]], "2 samples of 1 clients are kept: at most one each"),
        ([[7, GOOD]], [[math.nan, 0]], "not finite"),
        ([[7, GOOD]], [[1e30, 0]], "not finite"),
        ([[7, GOOD]], [[3, 4]], "another length than 1"),
    ],
)
def test_a_damaged_or_crafted_state_is_refused(records: Any, samples: Any, message: str):
    texts = isinstance(samples[0], list) and isinstance(samples[0][0], str)
    with pytest.raises(ValueError, match=message):
        Kept.of(records, np.array(samples, None if texts else float))
    Kept.of([[7, GOOD]], np.array([[1.0, 0.0]]))


def test_a_large_cohort_is_compared_with_some_of_it_evenly_spaced():
    # Of eight, every second: places 0, 2, 4 and 6. Rows are (1, 0), but for 2 and 4, (0, 1), and 6,
    # (−1, 0). Place 1 meets 0, 2, 4, 6: c = 1, 0, 0, −1, so 1 − 1 = 0. Place 0 meets no more than
    # 2, 4, 6: −1/√1.01. Places 2 and 4 meet each other: 1/√1.01. Place 6 meets 0: −1/√1.01.
    rows = [[1, 0], [1, 1e-6], [0, 1], [1, 2e-6], [1e-6, 1], [1, 3e-6], [-1, 0], [1, 4e-6]]
    verdicts, kept = Trust(samples=4).judge(see(rows), Kept())
    expected = np.array([-1, 0, 1, 0, 1, 0, -1, 0]) / math.sqrt(1.01)
    assert [v.agreement for v in verdicts] == pytest.approx(expected, abs=1e-4)
    assert list(kept.clients) == list(range(8))
    np.testing.assert_allclose(kept.samples, [[0, 1], [1, 0], [-1, 0], [1, 0]], atol=1e-4)


def test_the_last_kept_of_absent_clients_fill_up_what_is_compared_with():
    # a, b and c are kept. d and e come: with samples=4 they meet each other, c and b, but not a.
    # d = (1, 0) meets e = (0, 1): 0, b = (1, 0): 1, c = (−.6, .8): −.36. .64/√(1.1296 + .01).
    trust = Trust(samples=4)
    _, kept = trust.judge(see([[-1, 0], [1, 0], [-0.6, 0.8]], "abc"), Kept())
    verdicts, kept = trust.judge(see([[1, 0], [0, 1]], "de"), kept)
    assert verdicts[0].agreement == pytest.approx(0.64 / math.sqrt(1.1396), abs=1e-3)
    assert (list(kept.clients), len(kept.samples)) == (list("abcde"), 4)


def test_what_is_kept_is_bounded_and_of_the_last_clients():
    trust = Trust(samples=5, clients=8)
    kept, rng = Kept(), np.random.default_rng(1)
    last: dict[int, np.ndarray] = {}
    for _ in range(30):
        ids = rng.choice(40, 3, replace=False).tolist()
        rows = rng.standard_normal((3, 4)).astype(np.float32)
        _, kept = trust.judge(see(rows, ids), kept)
        for k, row in zip(ids, rows, strict=True):
            last.pop(k, None)
            last[k] = row / np.linalg.norm(row)
        assert list(kept.clients) == list(last)[-8:]
        np.testing.assert_allclose(kept.samples, list(last.values())[-5:], atol=5e-4)
        assert kept.samples.dtype == np.float16
    verdicts, kept = trust.judge(see(rng.standard_normal((20, 4)), list(range(20))), kept)
    assert len(verdicts) == 20  # a cohort larger than what is kept
    assert (len(kept.clients), len(kept.samples)) == (8, 5)
    _, kept = Trust(samples=0, clients=0).judge(see(np.eye(4)), kept)
    assert (len(kept.clients), len(kept.samples)) == (0, 0)


def test_samples_of_another_model_are_refused():
    _, kept = Trust().judge(see(THREE), Kept())
    with pytest.raises(ValueError, match=r"of 2 coordinates are kept, these have 3: begin with"):
        Trust().judge(see([[1, 2, 3]], ["new"]), kept)


def test_the_coordinates_are_the_same_for_everybody():
    chosen = Trust().coordinates(100_000)
    assert len(chosen) == 4096 == len(set(chosen.tolist()))
    assert (np.diff(chosen) > 0).all()
    assert 0 <= chosen[0] < chosen[-1] < 100_000
    np.testing.assert_array_equal(chosen, Trust(opposed=0.5).coordinates(100_000))
    np.testing.assert_array_equal(Trust().coordinates(4096), np.arange(4096))


# --------------------------------------------------------------------------------------- settings


def test_the_defaults_are_those_that_were_measured():
    """Other ones make the tables of docs/trust.md untrue."""
    measured = {"opposed": 1.0, "drifting": 4.0, "boosted": 3.0, "memory": 0.8, "floor": 0.15}
    assert Trust() == Trust(**measured, sample=4096, samples=64, clients=5000)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"opposed": 0.0}, r"Trust\(opposed=0.0\): must be greater than 0"),
        ({"opposed": math.nan}, "must be greater than 0"),
        ({"drifting": 0.0}, "greater than 0"),
        ({"boosted": 1.0}, r"Trust\(boosted=1.0\): must be greater than 1"),
        ({"memory": 1.1}, "must be in"),
        ({"sample": 0}, "1 or more"),
        ({"samples": -1}, "0 or more"),
        ({"clients": 63}, r"Trust\(clients=63\): must be at least as many as samples"),
        ({"floor": 0.0}, "greater than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Trust(**given)


def test_a_round_that_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match=r"Seen of 3 clients has norms \(2,\)"):
        see(THREE, norms=[1, 1])
    with pytest.raises(ValueError, match="one row for each"):
        Seen(clients=[1], norms=np.ones(1), losses=np.ones(1), sample=np.ones(4))
    for norm in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="only updates with a finite norm are judged"):
            see([[1, 2]], norms=[norm])


def test_distrust_leaves_out_by_its_flags():
    every = Distrust()
    assert [every.leaves_out([flag]) for flag in FLAGS] == [False, True, True, True]
    assert not every.leaves_out([])
    one = Distrust(flags=("drifting",))
    assert one.leaves_out(("copied", "drifting"))
    assert not one.leaves_out(("copied", "opposed", "boosted"))
    with pytest.raises(ValueError, match=r"Distrust\(flags=\('odd',\)\): must be some of drifting"):
        Distrust(flags=("odd",))
    with pytest.raises(ValueError, match="must be some of"):
        Distrust(flags=())
