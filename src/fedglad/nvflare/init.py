"""Writes a complete NVFlare job into a folder, ready to run and to be changed."""

import json
import shlex
from pathlib import Path

from fedglad.federation.template import write

TEMPLATE = Path(__file__).parent / "template"
SITES = 6  # as in the template


def init(folder: Path) -> list[Path]:
    """Writes the job; returns its files. A folder with anything in it is left alone."""
    # NVFlare's server runs the job in another folder: only a whole path leads back here.
    out = json.dumps(str(folder.absolute() / "out"), ensure_ascii=False)
    return write(TEMPLATE, folder, lambda text: text.replace('_dir": "out"', f'_dir": {out}'))


def command(folder: Path) -> str:
    """What to type so that the job in the folder runs in NVFlare's simulator.

    With as many threads as sites each is one process for the whole run; with fewer, every turn of a
    site starts a new one.
    """
    job, workspace = (shlex.quote(str(folder / name)) for name in ("job", "workspace"))
    return f"nvflare simulator {job} -w {workspace} -n {SITES} -t {SITES}"
