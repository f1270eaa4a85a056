"""Shakespeare's plays: a client is a role, and what it says is cut into windows of characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from fedglad.core.checks import check
from fedglad.data import store
from fedglad.data.federation import Partitioned
from fedglad.data.sources import parted
from fedglad.data.sources.shakespeare import CHARACTERS
from fedglad.data.validation import VALIDATION, check_share, taken
from fedglad.rng import stream

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # torch's `ignore_index`: the target where there is no next character
VOCABULARY = 1 + len(CHARACTERS)


class Roles(Partitioned):
    """Windows of what roles say, each role's last ones held back for the test.

    `names` has the clients' names, "hamlet: GHOST"; `client_test(k)` the windows of client k that
    are held back, of which the common test set has all or a part.
    """

    names: list[str]
    test_rows: list[np.ndarray]
    """Of each client, among all windows."""

    def client_test(self, k: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of client k that no client trains on."""
        import torch

        self._known(k)
        rows = torch.from_numpy(self.test_rows[k])
        return self.x.index_select(0, rows), self.y.index_select(0, rows)


@dataclass(frozen=True, kw_only=True)
class Shakespeare:
    """Next characters in 37 plays: a client is a role (LEAF, Caldas et al. 2018, arXiv:1812.01097).

    A sample is a window of a role's text, int64 (length,): the ids of its characters, and as
    targets those of the characters that follow each. Windows do not overlap. The last one of a
    role is filled up with 0, which is no character's id, and its targets there are −100, which
    torch's losses ignore. Ids 1 to 80 are LEAF's 80 characters in its order, the newline first.

    The last fifth of each role's windows is the test set, as in LEAF's split by time. Differs from
    LEAF: that predicts the one character after each of all windows, which overlap, and its roles
    are those of another edition, with two speeches or more.

    >>> Shakespeare(clients=50).needs  # what is fetched
    ('shakespeare',)
    """

    clients: Annotated[int, "roles, drawn by the seed; 0: all, 802 of 500 characters or more"] = 0
    min_characters: Annotated[int, "roles that say less are left out"] = 500
    length: Annotated[int, "characters of a window"] = 80
    test_share: Annotated[float, "of each role's windows, the last ones; one at least"] = 0.2
    test_windows: Annotated[int, "of the test set, drawn by the seed; 0: all"] = 0
    targets: Annotated[
        Literal["next", "same"],
        "next: each place's next character, for next-token; same: its own, for causal-lm",
    ] = "next"
    seed: Annotated[int, "of the roles, the test windows and the validation set"] = 0
    validation: Annotated[float, VALIDATION] = 0.0

    def __post_init__(self) -> None:
        check_share(self, self.validation)
        check(
            self,
            clients=(self.clients >= 0, "0 (all roles) or more"),
            min_characters=2,
            length=1,
            test_share=(0 < self.test_share < 1, "in (0, 1)"),
            test_windows=(self.test_windows >= 0, "0 (all of them) or more"),
        )
        if self.min_characters < self.length + 2:
            raise ValueError(
                f"{type(self).__name__}(min_characters={self.min_characters}): a role needs "
                f"{self.length + 2} for two windows of length {self.length}, one of them for the "
                "test: raise it, or lower length"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """What must be in the cache for it, by name."""
        return ("shakespeare",)

    def load_federation(self) -> Roles:
        """The windows with their owners; fetched and prepared when asked for the first time."""
        arrays = store.load("shakespeare")
        names, said = (parted(arrays[key], arrays[f"{key}_at"]) for key in ("names", "text"))
        return self.of_roles(dict(zip(names, said, strict=True)))

    def of_roles(self, texts: dict[str, str]) -> Roles:
        """The federation of these roles and what they say.

        >>> to_be = {"GHOST": "Mark me. " * 4}
        >>> data = Shakespeare(min_characters=20, length=10, test_share=0.5).of_roles(to_be)
        >>> (x, y), (held, _) = data.client(0), data.test()
        >>> decoded(x[0]), decoded(y[0]), decoded(held[-1])
        ('Mark me. M', 'ark me. Ma', 'k me.')
        """
        import torch

        large = [name for name, text in texts.items() if len(text) >= self.min_characters]
        if not large or self.clients > len(large):
            raise ValueError(
                f"{len(large)} roles have {self.min_characters} characters or more: data.clients = "
                f"{self.clients or 'all'} needs more of them; lower min_characters"
            )
        chosen = stream(self.seed, "roles").permutation(len(large))[: self.clients or None]
        names = [large[k] for k in np.sort(chosen)]
        cut = [windows(encoded(texts[name]), self.length) for name in names]
        x, y = (torch.from_numpy(np.concatenate(part)) for part in zip(*cut, strict=True))
        if self.targets == "same":
            y = torch.where(x > 0, x, IGNORED)
        owned: list[np.ndarray] = []
        tests: list[np.ndarray] = []
        out: list[np.ndarray] = []
        start = 0
        for k, (inputs, _) in enumerate(cut):
            rows = np.arange(start, start := start + len(inputs))
            held = max(1, min(len(rows) - 1, round(self.test_share * len(rows))))
            train, test = rows[:-held], rows[-held:]
            at = np.arange(0)
            if self.validation:
                at = taken(self.seed, k, len(train), self.validation)
            owned.append(np.delete(train, at))
            out.append(train[at])
            tests.append(test)
        validation = np.concatenate(out)
        if self.validation and not len(validation):
            raise ValueError(f"validation = {self.validation} of {len(x)} windows is not one")
        test = torch.from_numpy(self._part(np.concatenate(tests)))
        data = Roles(x, y, x[test], y[test], owned, validation=validation)
        data.names, data.test_rows = names, tests
        return data

    def _part(self, rows: np.ndarray) -> np.ndarray:
        """The test set's rows, or so many of them as were asked for."""
        if not 0 < self.test_windows < len(rows):
            return rows
        return np.sort(stream(self.seed, "test").permutation(rows)[: self.test_windows])


def windows(ids: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows of ids one after the other, and the ids that follow each; the last is filled up.

    >>> x, y = windows(np.array([5, 6, 7, 8]), 2)
    >>> x.tolist(), y.tolist()
    ([[5, 6], [7, 0]], [[6, 7], [8, -100]])
    """
    count = -(-(len(ids) - 1) // length)
    x = np.zeros(count * length, dtype=np.int64)
    y = np.full(count * length, IGNORED, dtype=np.int64)
    x[: len(ids) - 1], y[: len(ids) - 1] = ids[:-1], ids[1:]
    return x.reshape(count, length), y.reshape(count, length)


_IDS = np.zeros(256, dtype=np.int64)
_IDS[[ord(character) for character in CHARACTERS]] = np.arange(1, VOCABULARY)


def encoded(text: str) -> np.ndarray:
    """The ids of a text's characters.

    >>> encoded("\\n To").tolist()
    [1, 2, 45, 68]
    """
    codes = np.frombuffer(text.encode("latin-1", "replace"), dtype=np.uint8)
    ids = _IDS[codes]
    if not ids.all():
        at = int(np.argmin(ids))
        raise ValueError(f"the character {text[at]!r} has no id: {CHARACTERS!r} have one")
    return ids


def decoded(ids: Sequence[int] | Any) -> str:
    """The text of ids, without padding.

    >>> decoded([1, 2, 45, 68, 0])
    '\\n To'
    """
    return "".join(CHARACTERS[int(k) - 1] for k in ids if int(k) > 0)
