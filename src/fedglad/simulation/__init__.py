"""A round's driver, a federation on this machine that is one, and the engines that train clients.

May import everything up to the server, samplers and clients. Users reach it through
`fedglad.simulate` and the configuration's section `engine`.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.simulation.simulation import Parts as Parts
    from fedglad.simulation.simulation import Simulation as Simulation

__getattr__, __dir__ = lazily(__name__)
