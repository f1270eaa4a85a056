"""A federation on this machine: the generator of rounds, and the engines that train clients.

May import everything up to the server, samplers and clients. Users reach it through
`fedglad.simulate` and the configuration's section `engine`.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.simulation.simulation import Plan as Plan
    from fedglad.simulation.simulation import Simulation as Simulation

__getattr__, __dir__ = lazily(__name__, {"Plan": "simulation", "Simulation": "simulation"})
