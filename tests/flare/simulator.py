"""NVFlare's simulator as users start it: a job in a folder, its sites as processes."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CUSTOM = Path(__file__).parent / "custom"
SECONDS = 180.0  # after which a run is given up


@dataclass
class Job:
    """A job's folder, made of FedGLAD's arguments and those of the tests' `Site`."""

    folder: Path
    controller: Mapping[str, Any]
    executor: Mapping[str, Any] = field(default_factory=dict[str, Any])
    persistor: Mapping[str, Any] | None = None
    others: Sequence[Mapping[str, Any]] = ()
    path: str = "fedglad.nvflare.FedGLAD"

    def write(self) -> Path:
        """Writes the job, in the form that NVFlare's tools export."""
        config = self.folder / "app" / "config"
        config.mkdir(parents=True, exist_ok=True)
        components = [] if self.persistor is None else [{"id": "persistor", **self.persistor}]
        server = {
            "format_version": 2,
            "server": {"task_request_interval": 0.2},  # seconds after which a site asks again
            "workflows": [{"id": "controller", "path": self.path, "args": dict(self.controller)}],
            "components": [*components, *self.others],
        }
        executor = {"path": "sites.Site", "args": dict(self.executor)}
        client = {"format_version": 2, "executors": [{"tasks": ["*"], "executor": executor}]}
        meta = {"name": self.folder.name, "min_clients": 1, "deploy_map": {"app": ["@ALL"]}}
        (config / "config_fed_server.json").write_text(json.dumps(server), "utf-8")
        (config / "config_fed_client.json").write_text(json.dumps(client), "utf-8")
        (self.folder / "meta.json").write_text(json.dumps(meta), "utf-8")
        shutil.copytree(
            CUSTOM,
            self.folder / "app" / "custom",
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        return self.folder


@dataclass
class Done:
    """A run that has ended."""

    code: int
    output: str
    workspace: Path


class Simulation:
    """A simulator that runs; it and all its sites are one session of processes."""

    def __init__(self, python: Path, job: Path, sites: int, workspace: Path) -> None:
        self.workspace, self.log = workspace, workspace.with_suffix(".txt")
        module = "nvflare.private.fed.app.simulator.simulator"
        command = [python, "-m", module, job, "-w", workspace, "-n", sites]
        command += ["-t", sites]  # a process for each: else every turn starts one anew
        self._output = self.log.open("w")
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            cwd=workspace.parent,
            start_new_session=True,
        )

    def wait(self) -> Done:
        """Until the run has ended."""
        try:
            code = self._process.wait(SECONDS)
        finally:
            self.kill()
        return Done(code, self.log.read_text("utf-8", "replace"), self.workspace)

    def kill(self) -> None:
        """All its processes, at once, by -9."""
        for pid in self._members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        self._output.close()

    def _members(self) -> list[int]:
        """Of the session that was started here."""
        found: list[int] = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self._process.pid:
                found.append(int(stat.parent.name))
        return found


def wait_for(path: Path, lines: int, seconds: float = 120.0) -> None:
    """Until a file has so many lines."""
    deadline = time.monotonic() + seconds
    while not path.is_file() or path.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < deadline, f"{path} has not {lines} lines within {seconds:g} s"
        time.sleep(0.05)
