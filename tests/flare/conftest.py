"""A Python that has NVFlare: this one, or one of its own beside this one's packages."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
WANTED = "nvflare==2.9.*"


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its path. It is made once and shared by all test processes; nothing is installed twice."""
    if find_spec("nvflare"):
        return Path(sys.executable)
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "nvflare-env"
    found = place / "bin" / "python"
    with FileLock(f"{place}.lock"):
        if not (place / "ready").is_file():
            _make(place)
            (place / "ready").touch()
    return found


def _make(place: Path) -> None:
    """An environment that has this one's packages, and of NVFlare's those that are lacking."""
    subprocess.run([sys.executable, "-m", "venv", place], check=True, timeout=120)
    (packages,) = place.glob("lib/python*/site-packages")
    ours = sysconfig.get_path("purelib")  # with its own .pth files: an editable install is one
    (packages / "beside.pth").write_text(f"import site; site.addsitedir({ours!r})\n", "utf-8")
    # torch as it is here: no other may be downloaded in its place.
    torch = f"torch=={importlib.metadata.version('torch')}"
    command = [place / "bin" / "python", "-m", "pip", "install", "-q", WANTED, torch]
    command += ["-c", ROOT / "constraints.txt"]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        pytest.skip(f"{WANTED} cannot be installed here: {reason}")
