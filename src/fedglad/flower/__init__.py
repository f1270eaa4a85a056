"""The same Server inside Flower: a strategy, a monitor for other strategies, a mod for clients.

Nothing is loaded before it is used: `report_norms` needs NumPy alone, the others torch and flwr.
Knows server, samplers and runs; nothing of the library but the command line may import it.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.federation.telling import Tell as Tell
    from fedglad.flower.masking import secure_sum as secure_sum
    from fedglad.flower.mods import report_norms as report_norms
    from fedglad.flower.monitor import Monitor as Monitor
    from fedglad.flower.session import TooFewNodes as TooFewNodes
    from fedglad.flower.strategy import FedGLAD as FedGLAD
    from fedglad.flower.strategy import NothingTrained as NothingTrained
    from fedglad.flower.strategy import TooManySkipped as TooManySkipped
    from fedglad.runs.checkpoints import Keep as Keep
    from fedglad.secure.server import SecureSum as SecureSum

__all__ = [
    "FedGLAD",
    "Keep",
    "Monitor",
    "NothingTrained",
    "SecureSum",
    "Tell",
    "TooFewNodes",
    "TooManySkipped",
    "report_norms",
    "secure_sum",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "flwr": "Flower: pip install 'fedglad[flower]'",
        "cryptography": "cryptography: pip install 'fedglad[secure]'",
    },
)
