"""Engines: where clients train. serial is the reference, local a pool, ray a cluster, batched vmap.

`settings.py` has what a configuration says of them, `base.py` what they share.
"""

from typing import Any

REGISTRY: dict[str, Any] = {
    "serial": "fedglad.simulation.engines.settings:Serial",
    "local": "fedglad.simulation.engines.settings:Local",
    "ray": "fedglad.simulation.engines.settings:Ray",
    "batched": "fedglad.simulation.engines.settings:Batched",
}
