"""What a data set is to a simulation: clients that can be asked for their samples, and a test set.

`Partitioned` holds one data set and who owns which rows of it; a population too large to hold
(`synthetic.py`) makes a client's samples when they are asked for.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedglad.core import batch


class Federation(Protocol):
    """N clients with their samples, and one test set for the global model.

    It may also have:

    | member | meaning |
    |---|---|
    | `classes` | the number of classes; 0 where there are none |
    | `labels(k)` | how many samples of each class client k has; None where labels are not known |
    | `prepare(x, training)` | the model's inputs of a batch: stored bytes become numbers there, |
    | | and training images are augmented, by torch's generator |
    | `validation_set()` | inputs and targets that no client trains on and the best round is |
    | | chosen by; None where there are none. `held_out` makes one for any federation. |
    | `names` | what the clients are called: those of files, or the values of a column |
    | `client_test(k)` | inputs and targets of client k that it does not train on, for its own |
    | | score (`eval_clients`); None where it has none |
    | `with_test` | the clients that may have some; all of them by default |

    >>> class Coins:  # an own one; it inherits nothing
    ...     clients = 5
    ...     size = lambda self, k: 8
    ...     client = test = lambda self, k=0: (torch.full((8, 1), k / 5), torch.arange(8) % 2)
    >>> from fedglad import simulate
    >>> len([*simulate("digits", {"rounds": 2}, model=torch.nn.Linear(1, 2), data=Coins())])
    2
    """

    @property
    def clients(self) -> int:
        """The number of clients N; they are called 0 … N − 1."""
        ...

    def size(self, k: int) -> int:
        """How many samples client k has."""
        ...

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of client k."""
        ...

    def test(self) -> tuple[Tensor, Tensor]:
        """The inputs and targets that no client trains on."""
        ...


class Partitioned:
    """A data set in memory, and which rows of it each client owns.

    >>> x, y = torch.arange(10.0).view(5, 2), torch.tensor([0, 1, 1, 0, 2])
    >>> data = Partitioned(x, y, x[:1], y[:1], [np.array([4, 0]), np.array([1, 2, 3])])
    >>> data.client(0)[1], data.labels(1)
    (tensor([2, 0]), array([1, 2, 0]))
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        test_x: Tensor,
        test_y: Tensor,
        indices: Sequence[np.ndarray],
        transform: Callable[[Tensor, bool], Tensor] | None = None,
        validation: np.ndarray | None = None,
        validation_of: np.ndarray | None = None,
    ) -> None:
        """`validation` are rows of x and y that no client owns, for a validation set.

        `validation_of` says for each of them which client it is tested for; −1: for none.
        """
        for what, inputs, targets in (("training", x, y), ("test", test_x, test_y)):
            if len(inputs) != len(targets):
                raise ValueError(f"{len(inputs)} {what} inputs, but {len(targets)} targets")
        if not len(indices):
            raise ValueError("a federation needs at least one client, got no index arrays")
        sizes = [len(rows) for rows in indices]
        if 0 in sizes:
            raise ValueError(f"client {sizes.index(0)} has no samples: leave it out")
        rows = np.concatenate(indices)
        if not (np.issubdtype(rows.dtype, np.integer) and 0 <= rows.min() <= rows.max() < len(x)):
            raise ValueError(f"indices must be integers in 0 … {len(x) - 1}, the data set's rows")
        self.x, self.y, self.test_x, self.test_y = x, y, test_x, test_y
        self.transform = transform
        self.validation = None
        self.validation_of = np.arange(0) if validation_of is None else validation_of
        if validation is not None and len(validation):
            chosen = torch.from_numpy(validation.astype(np.int64, copy=False))
            self.validation = x.index_select(0, chosen), y.index_select(0, chosen)
        # One tensor for all clients, not one each: ten thousand of them are sent to a worker at
        # the price of one.
        self.rows = torch.from_numpy(rows.astype(np.int64, copy=False))
        self.bounds = [0, *np.cumsum(sizes).tolist()]
        self.labelled = y.dim() == 1 and not (y.is_floating_point() or y.is_complex())
        counts = [int(t.max()) + 1 for t in (y, test_y) if self.labelled and len(t)]
        self.classes = max(counts, default=0)

    @property
    def clients(self) -> int:
        """The number of clients N."""
        return len(self.bounds) - 1

    def size(self, k: int) -> int:
        """How many samples client k has."""
        self._known(k)
        return self.bounds[k + 1] - self.bounds[k]

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of client k, as copies."""
        rows = self._rows(k)
        return self.x.index_select(0, rows), self.y.index_select(0, rows)

    def locate(self, clients: Sequence[int]) -> tuple[Tensor, Tensor, list[np.ndarray]]:
        """All inputs and targets, and which rows of them each of the clients owns."""
        for k in clients:
            self._known(k)
        rows, bounds = self.rows.numpy(), self.bounds
        return self.x, self.y, [rows[bounds[k] : bounds[k + 1]] for k in clients]

    def test(self) -> tuple[Tensor, Tensor]:
        """The test inputs and targets."""
        return self.test_x, self.test_y

    def validation_set(self) -> tuple[Tensor, Tensor] | None:
        """The inputs and targets of the validation rows; None if none were given."""
        return self.validation

    def client_test(self, k: int) -> tuple[Tensor, Tensor] | None:
        """The validation samples that client k is tested with; None if there are none."""
        self._known(k)
        rows = torch.from_numpy(np.flatnonzero(self.validation_of == k))
        if self.validation is None or not len(rows):
            return None
        x, y = self.validation
        return x.index_select(0, rows), y.index_select(0, rows)

    def prepare(self, x: Tensor, training: bool) -> Tensor:
        """The model's inputs of a batch of stored ones, by the transform that was given."""
        return self.transform(x, training) if self.transform else x

    def labels(self, k: int) -> np.ndarray | None:
        """How many samples of each class client k has; None if the targets are not labels."""
        if not self.labelled:
            return None
        y = self.y[self._rows(k)]
        return torch.bincount(y[y >= 0], minlength=self.classes).numpy()  # −100 is no label

    def _known(self, k: int) -> None:
        if not 0 <= k < len(self.bounds) - 1:
            raise IndexError(f"client {k}: there are clients 0 … {self.clients - 1}")

    def _rows(self, k: int) -> Tensor:
        self._known(k)
        return self.rows[self.bounds[k] : self.bounds[k + 1]]


LOOKED_AT = 8  # clients whose samples are part of a fingerprint


def fingerprint(data: Federation) -> str:
    """A checksum of who there is, of some clients' samples and of the test set.

    So that two machines which opened the same data set know whether it is the same.
    """
    digest = hashlib.sha256(str(data.clients).encode())
    looked_at = np.unique(np.linspace(0, data.clients - 1, LOOKED_AT).astype(int)).tolist()
    for samples in (*map(data.client, looked_at), data.test()):
        for leaf in batch.leaves(samples):
            array = np.ascontiguousarray(leaf)
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(array.view(np.uint8).data if array.size else b"")
    return digest.hexdigest()[:16]
