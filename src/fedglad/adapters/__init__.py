"""Adapters: Statistics in, one factor per group out. They know no optimizer and no tensor.

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
