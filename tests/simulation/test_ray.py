"""The engine ray: the same bits on any cluster, and what happens when parts of it fail."""

from typing import Any

import pytest
from cluster_support import Nodes
from run_support import play

pytestmark = pytest.mark.slow

BRIEF: dict[str, Any] = {
    "rounds": 3,
    "data.clients": 120,
    "model.name": "mlp",
    "model.features": 64,
    "client.epochs": 1,
    "client.batch_size": 4,
    "server.name": "adam",
    "server.lr": 0.01,
    "average.name": "ema",
    "sampler.clients_per_round": 100,
}
KINDS: dict[str, dict[str, Any]] = {
    "scaffold": {**BRIEF, "client.name": "scaffold"},
    "adafl": {**BRIEF, "sampler.name": "adafl", "sampler.clients_per_round": 40},
}


def ray(nodes: Nodes, **settings: Any) -> dict[str, Any]:
    given = {f"engine.{name}": value for name, value in settings.items()}
    return {"engine.name": "ray", "engine.address": nodes.address, **given}


@pytest.mark.parametrize("kind", KINDS)
def test_one_node_or_three_give_the_bits_of_serial_and_local(nodes: Nodes, kind: str):
    given = KINDS[kind]
    serial = play({**given, "engine.name": "serial"})
    assert play({**given, "engine.workers": 2}) == serial
    for count in (1, 3):
        nodes.only(count)
        assert play({**given, **ray(nodes)}) == serial
