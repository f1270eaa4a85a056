"""Package clients: what npm and pip are set up for, so that a company's mirror serves as well.

A package's archive is read, and nothing of it is run, but for a source that only pip can tell from
others: see `pip`.
"""

import errno
import importlib.util
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fedglad.data.sources import LARGEST, DataError, Work

TIMEOUT = 20.0  # seconds without a byte


def npm(package: str, work: Work, most: int = LARGEST) -> Path:
    """The archive of a package in the registry that npm is set up for."""
    program = shutil.which("npm")
    if program is None:
        raise DataError("npm is not installed")
    options = ["--ignore-scripts", "--prefer-offline"]
    quick = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    work.progress.begin(f"npm pack {package}", None)
    command = [program, "pack", package, *options, *quick]
    return _run(command, "npm pack", r"npm (?:error|ERR!)", "*.tgz", work.scratch, most)


def pip(package: str, work: Work, most: int = LARGEST, checksum: str = "") -> Path:
    """The wheel of a package in the index that this Python's pip is set up for.

    With a checksum "sha256:…" it is the archive of its source that has it. To know a package by
    its source pip runs its setup.py: only after the archive has shown that checksum.
    """
    if importlib.util.find_spec("pip") is None:
        raise DataError(f"pip is not installed for {sys.executable}")
    options = ["--no-deps", "--no-input", "--quiet"]
    what = [package, "--only-binary=:all:"]
    if checksum:
        listed = Path(tempfile.mkdtemp(dir=work.scratch)) / "wanted.txt"
        listed.write_text(f"{package} --hash={checksum}\n", "utf-8")
        what = ["--require-hashes", f"--requirement={listed}"]
    quick = ["--retries=1", f"--timeout={TIMEOUT:g}", "--disable-pip-version-check"]
    work.progress.begin(f"pip download {package}", None)
    command = [sys.executable, "-m", "pip", "download", *what, *options, *quick]
    wanted = "*.tar.gz" if checksum else "*.whl"
    return _run(command, "pip download", "ERROR:", wanted, work.scratch, most)


def _run(
    command: list[str], what: str, complaint: str, wanted: str, scratch: Path, most: int = LARGEST
) -> Path:
    """Runs a package client in a new folder; returns the archive that it leaves there.

    It cannot write a file of more than `most` bytes.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch))
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
    )
    archives = sorted(folder.glob(wanted))
    if done.returncode or not archives:
        if full := re.search(r"No space left on device|ENOSPC", done.stderr):
            raise OSError(errno.ENOSPC, full.group(), str(folder))
        complaints = re.findall(rf"^{complaint} (.+)", done.stderr, re.MULTILINE)
        reason = "; ".join(complaints[:2]) or " ".join(done.stderr.split())[-200:]
        raise DataError(f"{what} failed: {reason or 'it left no archive'}")
    return archives[0]
