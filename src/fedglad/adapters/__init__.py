"""Adapters: Statistics in, one factor per group out. They know no optimizer and no tensor.

>>> import torch
>>> from fedglad import Server
>>> server = Server({"w": torch.zeros(2)}, adapter=Glad(gamma=0.5))
>>> for second in (1.0, -0.5):  # they agree, then they do not
...     record = server.step([{"w": torch.tensor([1.0, g])} for g in (1.0, second)])
>>> round(record.gsi["w"], 3), record.baseline["w"], round(record.scale["w"], 3)  # √1.625/√1.0625
(1.237, 1.0, 1.237)

An adapter is frozen settings; what it remembers is a dict of arrays with one entry per group. What
other modules must know of a rule (its bounds, what it needs, whether it can be replayed) the rule
says itself. `base` is what all have in common, `glad` has FedGLAD and its kin, `rivals` the rest.
May import records and core alone, and no torch.
"""

from fedglad.adapters.base import Adapter, AdapterState, Factors, Grouping, Groups, Relative
from fedglad.adapters.glad import Aligned, Glad, Pooled
from fedglad.adapters.rivals import FedExP, FedHyper, FedLWS, Fixed

__all__ = [
    "REGISTRY",
    "Adapter",
    "AdapterState",
    "Aligned",
    "Factors",
    "FedExP",
    "FedHyper",
    "FedLWS",
    "Fixed",
    "Glad",
    "Grouping",
    "Groups",
    "Pooled",
    "Relative",
]

REGISTRY = {
    "none": Adapter,
    "glad": Glad,
    "fedexp": FedExP,
    "fixed": Fixed,
    "fedhyper": FedHyper,
    "fedlws": FedLWS,
    "pooled": Pooled,
    "aligned": Aligned,
}
