"""The server: one round is validate ▸ filter ▸ aggregate ▸ method ▸ adapt ▸ step.

`intake` takes in a round's updates, `from_sums` a round of which only sums are known, and
`compatibility` says which parts cannot be combined. May import core and the small vocabularies:
optimizers, filters, weights and adapters.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.server.from_sums import Collector as Collector
    from fedglad.server.from_sums import Sums as Sums
    from fedglad.server.server import REGISTRIES as REGISTRIES
    from fedglad.server.server import Method as Method
    from fedglad.server.server import Server as Server


__getattr__, __dir__ = lazily(__name__)
