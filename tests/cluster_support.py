"""A Ray cluster of three nodes on this machine, which all tests of a session share.

It is started by the first test that asks for it, by a process of its own, and nobody is connected
to it: a test, or a command in another process, goes to its `address`. A test may kill nodes;
`three` of them are there again for the next that asks.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from shutil import rmtree

import pytest

NODES = 3
STORE = 100 << 20  # bytes of each node's object store
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or it warns of it
    # A node that is killed is missed after one or two seconds, not after half a minute.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}

# Lines in: "add GPUS", "remove ID", "kill ID"; a line out for each, and the address first. A node's
# ID is Ray's. Ends with its standard input, and the nodes with it.
SERVER = """
import sys
from ray.cluster_utils import Cluster

settings = {
    "node_ip_address": "127.0.0.1",
    "num_cpus": 1,
    "object_store_memory": int(sys.argv[2]),
    "include_dashboard": False,
    "temp_dir": sys.argv[1],
}
cluster = Cluster(initialize_head=True, head_node_args=settings)
nodes = {}
print(cluster.address, flush=True)
for line in sys.stdin:
    verb, *names = line.split()
    if verb == "add":
        node = cluster.add_node(**settings, num_gpus=int(names[0]))
        nodes[node.node_id] = node
        print(node.node_id, flush=True)
    else:
        cluster.remove_node(nodes.pop(names[0]), allow_graceful=verb == "remove")
        cluster.wait_for_nodes()
        print("done", flush=True)
cluster.shutdown()
"""


class Nodes:
    """The cluster: nodes with one CPU each, on the loopback interface, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        # What a node runs finds the tests' modules, as the command of `run_support` does.
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
        environment["RAY_TMPDIR"] = str(folder)  # where it notes its address for `auto`
        self.folder, self.log = folder / "ray", folder / "cluster.log"
        self.folder.mkdir()
        self.others: list[str] = []  # that may be killed: all but the head, by their IDs
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(self.folder), str(STORE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C is no business of it
            )
        try:
            self.address = self._answer()  # where a driver connects to: "127.0.0.1:PORT"
        except BaseException:
            self.close()
            raise

    def add(self, gpus: int = 0) -> str:
        """One more node; its ID. Its GPUs are those that it says it has."""
        self.others.append(self._ask(f"add {gpus}"))
        return self.others[-1]

    def kill(self, node: str) -> None:
        """As if its machine had lost its power; the cluster has seen it when this returns."""
        self.others.remove(node)
        self._ask(f"kill {node}")

    def only(self, count: int) -> None:
        """Adds and removes nodes until there are so many, the head among them."""
        while len(self.others) + 1 < count:
            self.add()
        for node in self.others[count - 1 :]:
            self.others.remove(node)
            self._ask(f"remove {node}")

    def close(self) -> None:
        self.process.communicate(timeout=60)

    def _ask(self, line: str) -> str:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout
        if not (line := self.process.stdout.readline().strip()):
            raise RuntimeError(f"the cluster has ended: {self.log.read_text()[-2000:]}")
        return line


@pytest.fixture(scope="session")
def nodes() -> Generator[Nodes]:
    """The cluster with as many nodes as the last test has left."""
    pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets' paths must be short
    try:
        made = Nodes(folder)
        try:
            yield made
        finally:
            made.close()
    finally:
        rmtree(folder, ignore_errors=True)


@pytest.fixture
def three(nodes: Nodes) -> Nodes:
    """The cluster with three nodes."""
    nodes.only(NODES)
    return nodes
