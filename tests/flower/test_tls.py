"""A federation with TLS and node authentication: those who belong to it train, and nobody else."""

import json
from pathlib import Path

import pytest

from fedglad.flower.init import init
from tests.flower.deployment import Federation


@pytest.mark.slow
def test_only_registered_nodes_take_part(tmp_path: Path):
    init(tmp_path / "app")
    out = tmp_path / "out"
    with Federation(tmp_path, nodes=2, tls=True, extra=2) as federation:
        unregistered = federation.start_node(2, retries=1)
        insecure = federation.start_node(3, insecure=True, keyless=True, retries=1)
        done = federation.run(
            tmp_path / "app",
            {"num-server-rounds": 1, "clients-per-round": 2, "min-nodes": 2, "out": str(out)},
        )
        said = f"{done.log}\n{federation.logs}"
        assert done.code == 0, said
        assert unregistered.wait() != 0
        assert insecure.wait() != 0
        assert "Exit Code: 305" in unregistered.log
        assert "Failed to activate SuperNode" in unregistered.log
        assert "Exit Code: 305" in insecure.log

    assert "asked 2 of 2 nodes" in done.log
    (line,) = (out / "rounds.jsonl").read_text("utf-8").splitlines()
    record = json.loads(line)
    assert record["status"] == "stepped"
    assert sorted(client["id"] for client in record["clients"]) == [0, 1]
    assert not [client for client in record["clients"] if "rejected" in client]
