"""Real federations on this machine: a SuperLink and SuperNodes as processes, on free ports.

    with Federation(tmp_path, nodes=4) as federation:
        done = federation.run(app, {"num-server-rounds": 3})
        federation.kill(2)

Each of them has an own FLWR_HOME, by which all its processes are found, whatever sessions they
have opened: none is left when the block ends. They start in an empty folder, as Flower's simulation
engine would take an app that lies there for the one that was sent.
"""

import datetime
import ipaddress
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NO_RAY = "Ray cannot start a Python whose path has a space" if " " in sys.executable else ""
"""Why Flower's simulation engine cannot be tried; empty if it can."""

READY = 60.0  # seconds within which a SuperLink must answer
RUN = 240.0  # seconds after which a run is given up
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}


def environment(home: Path) -> dict[str, str]:
    """That of a process of a federation; the commands are those beside this Python."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **OFFLINE, "PATH": tools, "FLWR_HOME": str(home)}


def free_ports(count: int) -> list[int]:
    """So many different ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for found in sockets:
        found.bind(("127.0.0.1", 0))
    ports = [int(found.getsockname()[1]) for found in sockets]
    for found in sockets:
        found.close()
    return ports


def kill_all(home: Path) -> None:
    """Ends every process that has this FLWR_HOME."""
    deadline = time.monotonic() + 20
    while pids := _processes(home):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of {home} do not end: {pids}")
        time.sleep(0.05)


def _processes(home: Path) -> list[int]:
    mark = f"FLWR_HOME={home}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it has ended, or is somebody else's
                continue
    return found


class Program:
    """A command in the background, with its output in a file."""

    def __init__(self, name: str, folder: Path, home: str, *command: str) -> None:
        self.name = name
        self.home = folder / "homes" / home
        self.home.mkdir(parents=True, exist_ok=True)
        self.neutral = folder / "empty"
        self.neutral.mkdir(exist_ok=True)
        self.file = folder / f"{name}.log"
        with self.file.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                cwd=self.neutral,
                env=environment(self.home),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self.file.read_text("utf-8", errors="replace")

    def wait(self, seconds: float = READY) -> int:
        """How it ended."""
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Ends it and all that it has started, at once and without a word."""
        kill_all(self.home)
        self.process.wait()


@dataclass(frozen=True)
class Done:
    """A run that was submitted: the exit code of `flwr run`, what it printed, the run's id."""

    code: int
    log: str
    run: str


class Federation:
    """A SuperLink and its SuperNodes; with `simulation`, the nodes are Flower's own."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        tls: bool = False,
        simulation: bool = False,
        extra: int = 0,
    ) -> None:
        """With `tls` every node has a key, and all but `extra` more nodes are registered."""
        self.folder = folder / "federation"
        self.folder.mkdir()
        self.count, self.tls, self.simulation = nodes, tls, simulation
        self.partitions = nodes + extra
        self.port, *self.ports = free_ports(1 + nodes + extra)
        self.address = f"127.0.0.1:{self.port}"
        self.keys = self.folder / "keys"
        self.nodes: dict[int, Program] = {}
        self.started: list[Program] = []
        self.home = self.folder / "homes" / "cli"
        self.home.mkdir(parents=True)
        connection = {"address": self.address, "insecure": not tls}
        if tls:
            self.keys.mkdir()
            make_certificates(self.keys)
            connection["root-certificates"] = str(self.keys / "ca.pem")
            for k in range(nodes + extra):
                make_key(self.keys / f"node{k}")
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in connection.items())
        (self.home / "config.toml").write_text(f"[superlink.here]\n{lines}", encoding="utf-8")

    def __enter__(self) -> Self:
        try:
            self.superlink = self.start_superlink()
            if not self.simulation:
                for k in range(self.count):
                    if self.tls:
                        self.register(k)
                    self.start_node(k)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything."""
        for program in self.started:
            program.kill()

    def start_superlink(self) -> Program:
        """Starts it, and waits until it answers."""
        tls = ["--insecure"]
        if self.tls:
            tls = ["--ssl-certfile", str(self.keys / "server.pem")]
            tls += ["--ssl-keyfile", str(self.keys / "server.key")]
            tls += ["--ssl-ca-certfile", str(self.keys / "ca.pem"), "--enable-supernode-auth"]
        kind = ["--simulation"] if self.simulation else []
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        program = self._start("superlink", "superlink", "flower-superlink", *where, *tls, *kind)
        deadline = time.monotonic() + READY
        while not self._healthy():
            if program.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the SuperLink does not answer:\n{program.log}")
            time.sleep(0.1)
        return program

    def start_node(
        self, k: int, *, insecure: bool = False, keyless: bool = False, retries: int | None = None
    ) -> Program:
        """Starts SuperNode k of the federation; `insecure` and `keyless` show less than asked."""
        command = ["flower-supernode", "--superlink", self.address]
        command += ["--host", "127.0.0.1", "--port", str(self.ports[k])]
        command += ["--node-config", f"partition-id={k} num-partitions={self.partitions}"]
        if insecure or not self.tls:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", str(self.keys / "ca.pem")]
        if self.tls and not keyless:
            command += ["--auth-supernode-private-key", str(self.keys / f"node{k}")]
        if retries is not None:
            command += ["--max-retries", str(retries)]
        self.nodes[k] = self._start(f"node{k}", f"node{k}", *command)
        return self.nodes[k]

    def register(self, k: int) -> None:
        """Tells the SuperLink that SuperNode k belongs to the federation."""
        done = self.flwr("supernode", "register", str(self.keys / f"node{k}.pub"), "here")
        assert done.returncode == 0, done.stdout + done.stderr

    def kill(self, k: int) -> None:
        """Ends SuperNode k and what it has started."""
        self.nodes.pop(k).kill()

    def run(self, app: Path, config: Mapping[str, Any] | None = None) -> Done:
        """Runs an app to its end."""
        submitted = self.submit(app, config)
        try:
            code = submitted.wait(RUN)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the run did not end:\n{submitted.log}\n{self.logs}") from None
        started = re.search(r"Successfully started run (\d+)", submitted.log)
        return Done(code, submitted.log, started[1] if started else "")

    def submit(self, app: Path, config: Mapping[str, Any] | None = None) -> Program:
        """Submits an app; what comes back prints the run's log and ends with it."""
        command = ["flwr", "run", str(app), "here", "--stream"]
        if config:
            pairs = [f"{key}={json.dumps(value)}" for key, value in config.items()]
            command += ["--run-config", " ".join(pairs)]
        if self.simulation:
            size = f"num-supernodes={self.count} client-resources-num-cpus=1"
            command += ["--federation-config", size]
        return self._start(f"run{len(self.started)}", "cli", *command)

    def status(self, run: str) -> str:
        """What the SuperLink says of a run, such as finished:completed."""
        done = self.flwr("list", "here", "--run-id", run, "--format", "json")
        return str(json.loads(done.stdout)["runs"][0]["status"])

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command of Flower."""
        return subprocess.run(
            ["flwr", *arguments],
            cwd=self.folder,
            env=environment(self.home),
            capture_output=True,
            text=True,
            timeout=READY,
        )

    @property
    def logs(self) -> str:
        """The last lines of all."""
        programs = [self.superlink, *self.nodes.values()]
        return "\n".join(f"== {p.name}\n{p.log[-2000:]}" for p in programs)

    def _start(self, name: str, home: str, *command: str) -> Program:
        self.started.append(Program(name, self.folder, home, *command))
        return self.started[-1]

    def _healthy(self) -> bool:
        context = None
        if self.tls:
            context = ssl.create_default_context(cafile=str(self.keys / "ca.pem"))
        url = f"{'https' if self.tls else 'http'}://{self.address}/health"
        try:
            with urllib.request.urlopen(url, timeout=2, context=context) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False


def make_certificates(folder: Path) -> None:
    """An authority, ca.pem, and its certificate for 127.0.0.1: server.pem and server.key."""
    authority, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test's authority")])
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(issuer, name, public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    own = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    ca = (
        certificate(issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(own, critical=False)
        .sign(authority, hashes.SHA256())
    )
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    server = (
        certificate(subject, key.public_key())
        .add_extension(here, critical=False)
        .add_extension(by, critical=False)
        .sign(authority, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / "server.key", key, serialization.PrivateFormat.PKCS8)


def make_key(path: Path) -> None:
    """What `ssh-keygen -t ecdsa -b 384` makes: a node's key, and its public half in .pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(path, key, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def _write_private(
    path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat
) -> None:
    text = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    path.touch(mode=0o600)
    path.write_bytes(text)
