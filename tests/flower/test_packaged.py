"""What `docker/` has, as far as it can be without Docker: its commands, run on this machine.

The compose file is read, and each of its services' commands started as it stands there, but for the
folders, the names of machines and the ports.
"""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedglad.flower.init import init
from tests.flower.deployment import OFFLINE, environment, free_ports, kill_all

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
TOKEN = "a-token-of-the-test"

COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))
DOCKERFILE = (DOCKER / "Dockerfile").read_text("utf-8")


def test_the_image_copies_what_its_build_needs():
    lines = re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    copied = [shlex.split(line)[1:-1] for line in lines if line.startswith("COPY ")]
    paths = [ROOT / name for names in copied for name in names]
    assert paths
    assert not [path for path in paths if not path.exists()]
    scripts = {path.name for path in paths if path.suffix == ".sh"}
    assert scripts == {path.name for path in DOCKER.glob("*.sh")}
    assert all(os.access(DOCKER / name, os.X_OK) for name in scripts)


def test_the_services_are_a_superlink_and_three_nodes_with_keys():
    services = COMPOSE["services"]
    nodes = [name for name in services if name.startswith("node")]
    assert nodes == ["node0", "node1", "node2"]
    for k, name in enumerate(nodes):
        command = shlex.split(services[name]["command"])
        assert command[command.index("--auth-supernode-private-key") + 1] == f"/keys/node{k}"
        assert f"partition-id={k} num-partitions=3" in command
    assert "--enable-supernode-auth" in services["superlink"]["command"]
    assert "--insecure" not in (DOCKER / "compose.yaml").read_text("utf-8")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_takes_the_units(tmp_path: Path):
    tools = str(Path(sys.executable).parent)
    names: list[str] = []
    for path in sorted((DOCKER / "systemd").glob("*.service")):
        # Its programs must be there; here they are beside this Python.
        text = path.read_text("utf-8").replace("/opt/fedglad/bin/", f"{tools}/")
        names.append(path.name.replace("@.", "@0."))
        (tmp_path / path.name).write_text(text, "utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in names)],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    if "sd_bus" in done.stderr or "Failed to initialize" in done.stderr:
        pytest.skip("systemd-analyze does not work here")
    assert not [line for line in done.stderr.splitlines() if str(tmp_path) in line], done.stderr
    assert len(names) == 3


def test_the_units_start_what_the_compose_file_does():
    """The same commands, but for where things lie."""
    for unit, service in (("superlink", "superlink"), ("node@", "node0")):
        parser = configparser.RawConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[method-assign, assignment]
        parser.read(DOCKER / "systemd" / f"fedglad-{unit}.service", "utf-8")
        theirs = shlex.split(COMPOSE["services"][service]["command"])
        ours = shlex.split(parser["Service"]["ExecStart"])
        options = [[x for x in words if x.startswith("--")] for words in (ours, theirs)]
        assert options[0] == options[1]
        assert Path(ours[0]).name == theirs[0]


# ------------------------------------------------------------------------------------ as it runs


class Compose:
    """The services of the compose file as processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.state.mkdir()
        self.keys = folder / "keys"
        self.home = folder / "home"
        self.started: list[subprocess.Popen[bytes]] = []
        self.port, self.watch, *rest = free_ports(5)
        self.ports = dict(zip(("node0", "node1", "node2"), rest, strict=True))

    def command(self, service: str) -> list[str]:
        text: str = COMPOSE["services"][service]["command"]
        for there, here in {
            "superlink:9092": f"127.0.0.1:{self.port}",
            "0.0.0.0": "127.0.0.1",
            "9092": str(self.port),
            "8756": str(self.watch),
            "/src/docker": str(DOCKER),
            "/keys": str(self.keys),
            "/state": str(self.state),
        }.items():
            text = text.replace(there, here)
        command = shlex.split(text)
        if service in self.ports:  # on one machine each needs its own
            command += ["--host", "127.0.0.1", "--port", str(self.ports[service])]
        return command

    def environment(self) -> dict[str, str]:
        one = environment(self.home)
        return {**one, "FEDGLAD_WATCH_TOKEN": TOKEN}

    def start(self, service: str) -> None:
        with (self.folder / f"{service}.log").open("ab") as log:
            self.started.append(
                subprocess.Popen(
                    self.command(service),
                    cwd=self.state,
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def close(self) -> None:
        kill_all(self.home)
        for process in self.started:
            process.wait()

    def run(self, *command: str, seconds: float = 120) -> str:
        done = subprocess.run(
            command,
            cwd=self.state,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.logs
        return done.stdout

    @property
    def logs(self) -> str:
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {x.stem}\n{x.read_text(errors='replace')[-1500:]}" for x in files)

    def healthy(self) -> bool:
        test: str = COMPOSE["services"]["superlink"]["healthcheck"]["test"]
        test = test.replace("9092", str(self.port)).replace("/keys", str(self.keys))
        done = subprocess.run(test, shell=True, env=self.environment(), capture_output=True)
        return done.returncode == 0


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    made = Compose(tmp_path)
    made.home.mkdir()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_the_compose_files_commands_make_a_federation(compose: Compose):
    compose.run(str(DOCKER / "keys.sh"), str(compose.keys), "3")
    compose.start("superlink")
    deadline = time.monotonic() + 60
    while not compose.healthy():
        assert time.monotonic() < deadline, compose.logs
        time.sleep(0.2)
    said = compose.run(*compose.command("register"))
    assert said.split("\n")[:3] == [f"node{k}: registered" for k in range(3)]
    again = compose.run(*compose.command("register"))  # as after `docker compose up` once more
    assert again.count("registered before") == 3
    for name in compose.ports:
        compose.start(name)
    compose.start("watch")
    init(compose.folder / "app")
    settings = f'num-server-rounds=2 clients-per-round=3 min-nodes=3 out="{compose.state}/out"'
    app = str(compose.folder / "app")
    log = compose.run("flwr", "run", app, "ours", "--stream", "--run-config", settings)
    assert "asked 3 of 3 nodes" in log
    address = f"http://127.0.0.1:{compose.watch}"
    deadline = time.monotonic() + 30
    while True:
        request = urllib.request.Request(
            f"{address}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        try:
            metrics = urllib.request.urlopen(request, timeout=5).read().decode()
            break
        except OSError:
            assert time.monotonic() < deadline, compose.logs
            time.sleep(0.2)
    assert "fedglad_round 2.0" in metrics
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{address}/metrics", timeout=5)


@pytest.mark.slow
def test_the_images_build_makes_an_environment(tmp_path: Path):
    """`build.sh` as the Dockerfile runs it, from a copy of what that copies, and nothing else."""
    source = tmp_path / "src"
    for line in re.sub(r"\\\n", " ", DOCKERFILE).splitlines():
        if line.startswith("COPY "):
            *names, to = shlex.split(line)[1:]
            for name in names:
                here, there = ROOT / name, source / Path(to).relative_to("/src")
                if here.is_dir():
                    shutil.copytree(
                        here, there, ignore=shutil.ignore_patterns("*.pyc", "*.egg-info")
                    )
                else:
                    there.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(here, there)
    plain = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(source / "docker" / "build.sh"), str(tmp_path / "env")],
        env={**plain, **OFFLINE},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, *_ = done.stdout.strip().splitlines()[-4:]
    assert first.startswith("fedglad "), done.stdout[-500:]
