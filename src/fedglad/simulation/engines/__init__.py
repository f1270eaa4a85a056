"""Engines: where clients train. serial is the reference, local a pool of processes, batched vmap.

`settings.py` has what a configuration says of them, `base.py` what they share.
"""

from typing import Any

REGISTRY: dict[str, Any] = {
    "serial": "fedglad.simulation.engines.settings:Serial",
    "local": "fedglad.simulation.engines.settings:Local",
    "batched": "fedglad.simulation.engines.settings:Batched",
}
