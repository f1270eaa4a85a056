"""Parameters and buffers that stay with each client, beside those that it shares."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fedglad.clients.method import PERSONAL, Buffers, Memory, Plain
from fedglad.core.layout import Layout


class Personal:
    """Which tensors of a model stay with each client, and how they come and go.

    Raises ValueError if there are none, or if nothing would be left to share.

    >>> from fedglad.core.layout import split
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> own = Personal(Plain(personal="1.*"), model, split(model)[0])
    >>> own.parameters, own.buffers
    (['1.weight', '1.bias'], ['1.running_mean', '1.running_var', '1.num_batches_tracked'])
    >>> own.numel  # of the parameters
    6
    """

    def __init__(self, client: Plain, model: nn.Module, layout: Layout) -> None:
        self.client, self.layout = client, layout
        names = {layout.aliases.get(name, name) for name in client.personal_names(model)}
        self.parameters = [name for name in layout.names if name in names]
        self.buffers = [name for name in layout.buffers if name in names]
        named = f"(personal={client.personal!r})" if client.personal else ""
        what = f"{type(client).__name__}{named}"
        if len(self.parameters) == len(layout.names):
            raise ValueError(
                f"{what} keeps every parameter of the model with the clients, so nothing would be "
                "shared: name fewer, or take another model"
            )
        if not (self.parameters or self.buffers):
            raise ValueError(
                f"{what} keeps nothing with the clients, as what it names is not trained: name "
                "parameters that are"
            )
        self.places = layout.places(self.parameters)

    @property
    def numel(self) -> int:
        """How many elements of the parameters stay with a client."""
        return len(self.places)

    def placed(self, theta: Tensor, buffers: Buffers, memory: Memory) -> tuple[Tensor, Buffers]:
        """The server's model with what a client kept in its place; itself, before a client has."""
        own = {n.removeprefix(PERSONAL): v for n, v in memory.items() if n.startswith(PERSONAL)}
        if not own:
            return theta, buffers
        theta = theta.clone()
        views = self.layout.views(theta)
        for name in self.parameters:
            views[name].copy_(own[name])
        return theta, {**buffers, **{name: own[name] for name in self.buffers}}

    def taken(self, w: Tensor, buffers: Mapping[str, Tensor]) -> Memory:
        """What a client keeps of its model."""
        views = self.layout.views(w)
        tensors = {name: views[name].clone() for name in self.parameters}
        tensors |= {name: buffers[name] for name in self.buffers}
        return {PERSONAL + name: value for name, value in tensors.items()}

    def cleared(self, vector: Tensor) -> Tensor:
        """The vector with zeros where nothing is sent, in place."""
        return vector.index_fill_(0, self.places.to(vector.device), 0)
