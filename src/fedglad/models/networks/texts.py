"""What models of texts share: padding that is not computed, tensors that are not sent.

A batch of texts is (b, L) ids, each text followed by an id that pads it up to L.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

PIECE = 64  # texts that are evaluated at a time: alike in length, and what they take is bounded
TRAINED = 8  # of a batch, where padding is left out: fewer pad less, but their products are slower


class Partial(nn.Module):
    """A module some of whose tensors are constants: not trained, not sent, not measured.

    They are neither parameters nor buffers, so no layout and no checkpoint has them, but they
    follow `.to(device)`. All copies of the module share them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.constants: tuple[str, ...] = ()

    def keep(self, name: str, value: Tensor) -> None:
        """Adds a constant of this name, which may be that of a submodule's tensor."""
        setattr(*self._place(name), value)
        self.constants = (*self.constants, name)

    def freeze(self) -> None:
        """Makes constants of all parameters that ask for no gradient; tied ones stay one tensor."""
        values: dict[int, Tensor] = {}
        for name, parameter in list(self.named_parameters(remove_duplicate=False)):
            if not parameter.requires_grad:
                delattr(*self._place(name))
                self.keep(name, values.setdefault(id(parameter), parameter.detach()))

    def kept(self) -> dict[str, Tensor]:
        """The constants by name."""
        return {name: getattr(*self._place(name)) for name in self.constants}

    def _place(self, name: str) -> tuple[nn.Module, str]:
        owner, _, attribute = name.rpartition(".")
        return self.get_submodule(owner), attribute

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        values: dict[int, Tensor] = {}
        for name, value in self.kept().items():
            if id(value) not in values:
                values[id(value)] = fn(value)
            setattr(*self._place(name), values[id(value)])
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(value): value for value in self.kept().values()}
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        state: Mapping[str, Any] = copy.deepcopy(self.__dict__, memo)
        twin.__setstate__(state)
        return twin


def ends(x: Tensor, pad: int = 0) -> Tensor:
    """The number of ids of each text before its padding; at least 1.

    >>> ends(torch.tensor([[7, 8, 0, 9, 0], [0, 0, 0, 0, 0]]))
    tensor([4, 1])
    """
    places = torch.arange(1, x.shape[1] + 1, device=x.device)
    return ((x != pad) * places).amax(dim=1).clamp_min(1)


def in_pieces(
    scores: Callable[[Tensor], Tensor], x: Tensor, lengths: Tensor | None = None, piece: int = PIECE
) -> Tensor:
    """The scores of many texts, a piece at a time; texts of about one length together, if given."""
    if len(x) <= piece:
        return scores(x)
    if lengths is None:
        return torch.cat([scores(part) for part in x.split(piece)])
    order = lengths.argsort(stable=True)
    in_order = torch.cat([scores(x[rows]) for rows in order.split(piece)])
    return in_order[order.argsort()]
