"""The same Server inside NVFlare: a controller of its ModelController API.

Nothing is loaded before it is used. Knows what all federations have in common; nothing of the
library but the command line may import it.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.nvflare.controller import FedGLAD as FedGLAD
    from fedglad.nvflare.controller import NothingTrained as NothingTrained

__all__ = ["FedGLAD", "NothingTrained"]

__getattr__, __dir__ = lazily(__name__, {"nvflare": "NVFlare: pip install 'fedglad[nvflare]'"})
