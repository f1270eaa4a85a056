"""The protocol's two roles, in one process: who leaves when, who asks for what."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedglad.secure import Refused, Round, SecureSum, TooFew
from secure.support import STAGES, Drive


def test_three_clients_are_their_sum():
    # By hand: (1, 0.5) + (2, −1) + (3, 0.25) = (6, −0.25); the numbers 1.5 + 1 + 3.25 = 5.75.
    drive = Drive([[1, 0.5], [2, -1], [3, 0.25]])
    total = drive.run()
    assert total.body.tolist() == [6, -0.25]
    assert total.numbers == [5.75]
    assert total.clients == (1, 2, 3)
    assert not any(drive.states.values()), "secrets are kept after the round"


@pytest.mark.parametrize(
    ("stage", "left"),
    [("keys", (1, 3, 4)), ("shares", (1, 3, 4)), ("masked", (1, 3, 4)), ("unmask", (1, 2, 3, 4))],
)
def test_one_of_four_leaves(stage: str, left: tuple[int, ...]):
    # t of 4 at a threshold of one half is 3. Who leaves before `unmask` is in the sum.
    vectors = [[1.0, 10], [2, 20], [4, 40], [8, 80]]
    total = Drive(vectors, leaves={2: stage}).run()
    expected = sum(vectors[k - 1][0] for k in left)
    assert total.clients == left
    assert total.body.tolist() == [expected, 10 * expected]
    assert total.numbers == [11 * expected]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whoever_leaves_the_sum_is_of_those_who_stay(data: st.DataObject):
    n = data.draw(st.integers(2, 8), label="clients")
    threshold = data.draw(st.sampled_from([0.5, 2 / 3, 0.9]))
    stages = data.draw(
        st.lists(st.sampled_from([*STAGES, "stays", "stays"]), min_size=n, max_size=n)
    )
    leaves = {k: stage for k, stage in enumerate(stages, 1) if stage != "stays"}
    values = st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=3)
    vectors = [data.draw(values) for _ in range(n)]
    drive = Drive(vectors, SecureSum(threshold=threshold), leaves)
    helpers = n - len(leaves)
    if helpers < drive.settings.least(n):
        with pytest.raises(TooFew, match=f"{drive.settings.least(n)} are needed"):
            drive.run()
        return
    total = drive.run()
    kept = [k for k in drive.vectors if leaves.get(k, "unmask") == "unmask"]
    assert total.clients == tuple(kept)
    resolution = len(kept) * 2.0**-33
    expected = np.sum([drive.vectors[k] for k in kept], axis=0)
    assert np.abs(total.body - expected).max() <= resolution * 1.001 + 1e-11


@pytest.mark.parametrize("stage", STAGES)
def test_t_minus_one_that_stay_see_nothing(stage: str):
    # t of 5 at 2/3 is 4: with 3 left there is no sum, and the reason says who went.
    drive = Drive([[1.0]] * 5, SecureSum(), {4: stage, 5: stage})
    with pytest.raises(TooFew, match=r"3 of 5 clients .*4 are needed to see a sum.*gone"):
        drive.run()


def test_what_t_is():
    assert [SecureSum().least(n) for n in (2, 3, 4, 6, 10, 50)] == [2, 3, 3, 5, 7, 34]
    assert [SecureSum(threshold=0.5).least(n) for n in (2, 3, 4, 5)] == [2, 2, 3, 3]
    with pytest.raises(ValueError, match=r"threshold=0.4: must be a share in \[0.5, 1\)"):
        SecureSum(threshold=0.4)
    with pytest.raises(ValueError, match="fraction=63"):
        SecureSum(fraction=63)
    with pytest.raises(TooFew, match="seen by itself"):
        Drive([[1.0]])
    assert Round(SecureSum(), "one", 10, least=9).threshold == 9
    with pytest.raises(TooFew, match="4 clients take part, 5 are needed"):
        Round(SecureSum(), "one", 4, least=5)


def test_what_travels():
    # Of n = 4 clients, 5 elements and one number: as docs/privacy.md says.
    drive = Drive([[1.0] * 5] * 4)
    asked = drive.round.ask_keys()
    replies = {k: drive.call("keys", k, m) for k, m in asked.items()}
    assert size(replies[1]) == 64
    asked = drive.round.take_keys(replies)
    assert size(asked[1]) == 4 * 64
    replies = {k: drive.call("shares", k, m) for k, m in asked.items()}
    assert size(replies[1]) == 3 * 94 + 32
    asked = drive.round.take_shares(replies)
    assert size(asked[1]) == 3 * 94
    for k, message in asked.items():
        reply, body = drive.mask(k, message)
        assert (size(reply), body.nbytes) == (32, 5 * 8)
        drive.round.take_masked(k, reply, body)
    assert size(drive.call("unmask", 1, drive.round.ask_unmask()[1])) == 4 * 33


def size(message: dict) -> int:
    """The bytes in a message."""
    values = [
        v for value in message.values() for v in (value if isinstance(value, list) else [value])
    ]
    return sum(len(value) for value in values if isinstance(value, bytes))


def refuses(drive: Drive, name: str, k: int, message: dict, match: str) -> None:
    """The client refuses, and answers the right message after it as if nothing had been."""
    before = dict(drive.states[k])
    with pytest.raises(Refused, match=match):
        drive.call(name, k, message)
    assert drive.states[k] == before


def four() -> Drive:
    return Drive([[1.0], [2.0], [4.0], [8.0]], leaves={4: "masked"})


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"dropped": [3, 4]}, "both secrets of client 3"),
        ({"alive": [1, 2, 3, 4], "dropped": [4]}, "both secrets of client 4"),
        ({"dropped": []}, "are not the clients that shared secrets"),
        ({"dropped": [4, 5]}, "are not the clients that shared secrets"),
        ({"alive": [2, 3], "dropped": [1, 4]}, "says that this client has sent no vector"),
        ({"alive": [1, 2], "dropped": [3, 4]}, "2 clients are left, 3 are needed"),
        ({"alive": [3, 2, 1]}, "not a list of different places in order"),
        ({"alive": [1, 1, 2, 3]}, "not a list of different places in order"),
        ({"alive": "all"}, "not a list of different places"),
        ({"session": "run 7, round 2, attempt 0"}, "of session 'run 7, round 2, attempt 0'"),
    ],
)
def test_a_client_refuses_to_unmask(changed: dict, match: str):
    drive = four()
    asked = drive.up_to_masked()
    assert (asked[1]["alive"], asked[1]["dropped"]) == ([1, 2, 3], [4])
    refuses(drive, "unmask", 1, {**asked[1], **changed}, match)
    assert drive.call("unmask", 1, asked[1])["of"] == [1, 2, 3, 4]


def test_a_second_list_of_survivors_is_not_answered():
    # The first answer has the seeds' shares of 1, 2, 3; the second would have 3's key's share.
    drive = Drive([[1.0], [2.0], [4.0], [8.0], [16.0]])
    asked = drive.up_to_masked()
    assert drive.call("unmask", 1, asked[1])
    other = {**asked[1], "alive": [1, 2, 4, 5], "dropped": [3]}
    refuses(drive, "unmask", 1, other, "no session is open")


def test_an_unmasking_answer_has_one_secret_of_each():
    drive = four()
    asked = drive.up_to_masked()
    held = {
        k: dict(zip(drive.states[k]["held"], drive.states[k]["held_shares"], strict=True))
        for k in (1, 2, 3)
    }
    for k in (1, 2, 3):
        answer = drive.call("unmask", k, asked[k])
        for of, share in zip(answer["of"], answer["shares"], strict=True):
            key_share, seed_share = held[k][of][:33], held[k][of][33:]
            assert share == (key_share if of == 4 else seed_share)


def test_messages_in_another_order_or_again_are_refused():
    drive = four()
    asked = drive.round.ask_keys()
    message = {"session": drive.round.session}
    refuses(drive, "shares", 1, message, "no session is open")
    replies = {k: drive.call("keys", k, m) for k, m in asked.items()}
    refuses(drive, "receive", 1, message, "masked is asked for where shares comes next")
    asked = drive.round.take_keys(replies)
    drive.call("shares", 1, asked[1])
    refuses(drive, "shares", 1, asked[1], "shares is asked for where masked comes next")
    refuses(drive, "unmask", 1, message, "unmask is asked for where masked comes next")
    with pytest.raises(Refused, match="nothing to mask"):
        drive.client(1).mask(np.zeros(1, np.uint64), [0])


def test_shares_of_an_earlier_round_cannot_be_opened():
    first, second = Drive([[1.0]] * 3), Drive([[1.0]] * 3, session="run 7, round 2, attempt 0")
    old, new = first.up_to_shares(), second.up_to_shares()
    refuses(second, "receive", 1, old[1], "of session 'run 7, round 1, attempt 0', not")
    replayed = {**new[1], "shares": old[1]["shares"]}
    refuses(second, "receive", 1, replayed, "cannot be opened")


def test_shares_meant_for_another_cannot_be_opened():
    drive = Drive([[1.0]] * 3)
    asked = drive.up_to_shares()
    swapped = {**asked[1], "shares": asked[2]["shares"]}
    refuses(drive, "receive", 1, swapped, "cannot be opened")


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"threshold": 2}, "2 of 4 clients: it must be more than half"),
        ({"threshold": 5}, "5 of 4 clients"),
        ({"clients": 1, "threshold": 1, "place": 1}, "1 of 1 clients"),
        ({"threshold": True}, "threshold is 'True', not a whole number"),
        ({"place": 5}, "place 5 of 4"),
        ({"fraction": 63}, "63 bits"),
        ({"session": ""}, "no session"),
    ],
)
def test_a_client_does_not_begin_what_would_not_protect_it(changed: dict, match: str):
    drive = four()
    refuses(drive, "keys", 1, {**drive.round.ask_keys()[1], **changed}, match)


def with_keys() -> tuple[Drive, dict]:
    drive = four()
    asked = drive.round.ask_keys()
    replies = {k: drive.call("keys", k, m) for k, m in asked.items()}
    return drive, drive.round.take_keys(replies)[1]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda m: {k: m[k][:2] for k in ("places", "mask_keys", "share_keys")},
            "2 clients sent keys, 3",
        ),
        (
            lambda m: {k: m[k][1:] for k in ("places", "mask_keys", "share_keys")},
            "place 1 is not among",
        ),
        (lambda m: {"mask_keys": [m["mask_keys"][0]] * 4}, "1 different mask keys"),
        (lambda m: {"share_keys": m["mask_keys"]}, "the same public key"),
        (lambda m: {"mask_keys": [*m["mask_keys"][1:], m["mask_keys"][0]]}, "not its own"),
        (lambda m: {"mask_keys": "all"}, "not a list of bytes"),
    ],
)
def test_a_client_shares_nothing_by_odd_keys(change, match: str):
    drive, message = with_keys()
    refuses(drive, "shares", 1, {**message, **change(message)}, match)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"senders": [2], "shares": [b""]}, "2 clients sent shares, 3 are needed"),
        ({"senders": [1, 2, 3]}, "shares came from the clients 1, 2, 3"),
        ({"senders": [2, 3]}, "shares came from"),
        ({"senders": [2, 3, 5]}, "shares came from"),
    ],
)
def test_a_client_masks_nothing_with_too_few(changed: dict, match: str):
    drive = four()
    asked = drive.up_to_shares()
    refuses(drive, "receive", 1, {**asked[1], **changed}, match)


def test_who_answers_nonsense_is_left_out_and_the_sum_is_of_the_others():
    drive = Drive([[1.0], [2.0], [4.0], [8.0]])
    asked = drive.round.ask_keys()
    replies = {k: drive.call("keys", k, m) for k, m in asked.items()}
    replies[3]["mask_key"] = b"short"
    asked = drive.round.take_keys(replies)
    assert drive.round.left_out == {3: "it sent no pair of public keys"}
    drive.round.take_shares({k: drive.call("shares", k, m) for k, m in asked.items()})


@pytest.mark.parametrize(
    ("body", "numbers", "match"),
    [
        (np.zeros(2, np.uint64), bytes(32), "not the size of the others'"),
        (np.zeros(1, np.uint64), bytes(64), "not the size of the others'"),
        (np.zeros(1, np.uint64), bytes(31), "not of 256 bits"),
        (np.zeros(1), bytes(32), "not one of 64-bit integers"),
        (None, bytes(32), "not one of 64-bit integers"),
    ],
)
def test_a_vector_of_another_form_is_as_none(body, numbers: bytes, match: str):
    drive = Drive([[1.0], [2.0], [4.0], [8.0]])
    asked = drive.up_to_shares()
    for k in (1, 2, 3):
        drive.round.take_masked(k, *drive.mask(k, asked[k]))
    drive.mask(4, asked[4])
    assert not drive.round.take_masked(4, {"numbers": numbers}, body)
    assert match in drive.round.left_out[4]
    asked = drive.round.ask_unmask()
    total = drive.round.unmask({k: drive.call("unmask", k, asked[k]) for k in (1, 2, 3)})
    assert total.body.tolist() == [7.0]


@pytest.mark.parametrize(("of", "who"), [(2, "client 2's"), (4, "client 4's")])
def test_a_false_share_is_seen(of: int, who: str):
    drive = four()  # client 4 has left: its key is put together; of the others their seeds
    asked = drive.up_to_masked()
    replies = {k: drive.call("unmask", k, asked[k]) for k in (1, 2, 3)}
    at = replies[1]["of"].index(of)
    replies[1]["shares"][at] = bytes([1]) * 33
    with pytest.raises(TooFew, match=f"the shares of {who} secret do not make what it is"):
        drive.round.unmask(replies)


def test_the_one_that_was_left_out_in_the_middle_may_begin_anew():
    drive = four()
    drive.run()
    again = Drive([[1.0], [2.0], [4.0], [8.0]], session="run 7, round 2, attempt 0")
    again.states = drive.states  # client 4 still has the secrets of the round before
    assert again.states[4]
    assert again.run().body.tolist() == [15.0]
    assert not again.states[4]
