"""Samplers: who takes part in a round. One file a sampler; `base.py` has what they share.

A sampler is frozen settings; what it remembers is a dict of JSON types that the checkpoint saves.
May import records, rng and weights.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.samplers.adafl import AdaFL as AdaFL
    from fedglad.samplers.base import Cohort as Cohort
    from fedglad.samplers.base import Pool as Pool
    from fedglad.samplers.base import Sampler as Sampler
    from fedglad.samplers.clustered import Clustered as Clustered
    from fedglad.samplers.fedml import FedML as FedML
    from fedglad.samplers.md import MD as MD
    from fedglad.samplers.optimal import Optimal as Optimal
    from fedglad.samplers.power_of_choice import PowerOfChoice as PowerOfChoice
    from fedglad.samplers.scripted import Scripted as Scripted
    from fedglad.samplers.uniform import Uniform as Uniform

__getattr__, __dir__ = lazily(__name__)

REGISTRY = {
    "uniform": "fedglad.samplers.uniform:Uniform",
    "fedml": "fedglad.samplers.fedml:FedML",
    "scripted": "fedglad.samplers.scripted:Scripted",
    "md": "fedglad.samplers.md:MD",
    "adafl": "fedglad.samplers.adafl:AdaFL",
    "power-of-choice": "fedglad.samplers.power_of_choice:PowerOfChoice",
    "clustered": "fedglad.samplers.clustered:Clustered",
    "optimal": "fedglad.samplers.optimal:Optimal",
}
