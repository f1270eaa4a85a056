"""The Ray cluster that a process uses: one that is there already, or one of its own.

An own one has this machine's cores, listens on the loopback interface alone, and lies in a
temporary folder that goes with it, also if the process is killed.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

NEEDED = 'install Ray with pip install "fedglad[ray]"'
LONGEST = 60  # characters of a temporary folder: Ray puts sockets into it, whose paths have a limit
REACHED = 5.0  # seconds in which somebody must answer at an address

KEEPER = """
import shutil, sys, time
sys.stdin.read()  # until whoever started this ends
for _ in range(50):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.2)
"""


def import_ray() -> Any:
    """Ray itself, with its telemetry off; ValueError where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or it warns of it
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"Ray is not installed ({error}): {NEEDED}") from None
    return ray


class Cluster:
    """A connection to a cluster: `address` is "" for an own one, "auto", or "host:port".

    What the process is connected to already is used as it is, and stays connected.
    """

    def __init__(self, address: str = "", cpus: int | None = None) -> None:
        """`cpus` of an own cluster, by default as many as there are."""
        self.ray = import_ray()
        self.connected, self.folder, self._keeper, self._print = False, None, None, None
        if self.ray.is_initialized():
            return
        try:
            with _own_signals():
                self._own(cpus) if not address else self._join(address)
            self._print = _log_messages()
        except BaseException:
            self.close()
            raise

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """Those that are alive."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    @property
    def deaths(self) -> tuple[type[Exception], ...]:
        """What Ray raises where a worker, its node or what it had is gone."""
        errors = self.ray.exceptions
        return (
            errors.RayActorError,
            errors.ObjectLostError,
            errors.NodeDiedError,
            errors.WorkerCrashedError,
            errors.OutOfMemoryError,
        )

    def close(self) -> None:
        """Ends the connection, and a cluster of our own with its folder."""
        if self.connected:
            self.connected = False
            self.ray.shutdown()
        if self._print:
            self._print()
            self._print = None
        if self.folder:
            rmtree(self.folder, ignore_errors=True)
            self.folder = None
        if self._keeper:
            self._keeper.kill()
            self._keeper.communicate()
            self._keeper = None

    def _join(self, address: str) -> None:
        host, colon, port = address.rpartition(":")
        local: Any = nullcontext()
        if colon and "//" not in address:
            try:
                socket.create_connection((host, int(port)), REACHED).close()
            except (OSError, ValueError) as error:
                raise ValueError(f"no Ray cluster answers at {address!r}: {error}") from None
            local = _loopback() if _only_local(host, int(port)) else local
        self.connected = True
        try:
            with local:
                self.ray.init(address=address, log_to_driver=False, **_QUIET)
        except ConnectionError as error:
            self.connected = False
            raise ValueError(
                f"no Ray cluster answers at {address!r}: {str(error).splitlines()[0]}. Start one "
                'with `ray start --head`, or leave the address out ("") for this machine alone'
            ) from None

    def _own(self, cpus: int | None) -> None:
        base = tempfile.gettempdir()
        if len(base) > LONGEST:
            base = "/tmp"
        self.folder = Path(tempfile.mkdtemp(prefix="fedglad-ray-", dir=base))
        command = [sys.executable, "-S", "-c", KEEPER, str(self.folder)]
        self._keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self.connected = True
        with _loopback():
            self.ray.init(
                address="local",
                num_cpus=cpus or os.cpu_count() or 1,
                include_dashboard=False,
                _temp_dir=str(self.folder),
                log_to_driver=False,
                **_QUIET,
            )


_QUIET = {"logging_level": logging.ERROR, "configure_logging": False}


def _log_messages() -> Callable[[], None]:
    """Has Ray's messages about nodes logged until the result is called.

    Ray prints them to stdout, in the middle of a table, or of JSON, and has no option for it.
    """
    from ray._private import worker

    def log(data: dict[str, Any], *args: Any, **options: Any) -> None:
        for line in data.get("lines", ()):
            logging.getLogger("fedglad").info("%s", line)

    printing = worker.print_to_stdstream
    worker.print_to_stdstream = log

    def restore() -> None:
        worker.print_to_stdstream = printing

    return restore


def _only_local(host: str, port: int) -> bool:
    """Whether a cluster listens on the loopback interface alone: Ray would look for it elsewhere,
    and wait for minutes."""
    if host not in ("localhost", "127.0.0.1", "::1"):
        return False
    from ray.util import get_node_ip_address

    try:
        socket.create_connection((get_node_ip_address(), port), REACHED).close()
    except OSError:
        return True
    return False


@contextmanager
def _loopback() -> Generator[None]:
    """Has Ray take the loopback address for this machine's: it has a switch for it, but no option.

    Without it a cluster of one machine is open to everybody who reaches the machine.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _own_signals() -> Generator[None]:
    """Keeps this process's own answers to signals, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(TypeError):  # one that was not set from Python
                signal.signal(number, handler)
