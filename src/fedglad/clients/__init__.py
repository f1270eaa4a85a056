"""Client methods: the one local training loop, and one small file a method.

>>> import fedglad
>>> settings = {"client.name": "fedprox", "client.mu": 0.01, "rounds": 1, "client.epochs": 1}
>>> [round.record.status for round in fedglad.simulate("digits", settings)]
['stepped']

May import rng, core and tasks; imported by the simulation. A method corrects each minibatch
gradient ∇, or has a loss, a step or a training of its own, and may keep vectors with each client
and at the server; docs/methods.md has them all, docs/client-methods.md how to write one.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.clients.ditto import Ditto as Ditto
    from fedglad.clients.fedbn import FedBN as FedBN
    from fedglad.clients.feddyn import FedDyn as FedDyn
    from fedglad.clients.fednova import FedNova as FedNova
    from fedglad.clients.fedprox import FedProx as FedProx
    from fedglad.clients.fedrep import FedRep as FedRep
    from fedglad.clients.fedsam import FedSAM as FedSAM
    from fedglad.clients.fedsgd import FedSGD as FedSGD
    from fedglad.clients.local_model import LocalData as LocalData
    from fedglad.clients.local_model import LocalModel as LocalModel
    from fedglad.clients.method import Plain as Plain
    from fedglad.clients.method import Trained as Trained
    from fedglad.clients.moon import MOON as MOON
    from fedglad.clients.scaffold import Scaffold as Scaffold
    from fedglad.clients.vrl_sgd import VRLSGD as VRLSGD
    from fedglad.clients.workbench import Workbench as Workbench

__getattr__, __dir__ = lazily(__name__)

REGISTRY = {
    "plain": "fedglad.clients.method:Plain",
    "fedsgd": "fedglad.clients.fedsgd:FedSGD",
    "fedprox": "fedglad.clients.fedprox:FedProx",
    "scaffold": "fedglad.clients.scaffold:Scaffold",
    "feddyn": "fedglad.clients.feddyn:FedDyn",
    "fednova": "fedglad.clients.fednova:FedNova",
    "vrl-sgd": "fedglad.clients.vrl_sgd:VRLSGD",
    "moon": "fedglad.clients.moon:MOON",
    "fedsam": "fedglad.clients.fedsam:FedSAM",
    "fedbn": "fedglad.clients.fedbn:FedBN",
    "fedrep": "fedglad.clients.fedrep:FedRep",
    "ditto": "fedglad.clients.ditto:Ditto",
}
