"""Writes a complete Flower app into a folder, ready to run and to be changed."""

import json
import re
import shlex
from pathlib import Path

from fedglad.federation.template import InitError as InitError
from fedglad.federation.template import write

TEMPLATE = Path(__file__).parent / "template"
PACKAGE, PROJECT = "digits_app", "digits-app"  # the template's names, replaced in each app
SUPERNODES = 50
LONGEST = 32  # characters of an app's name that Flower allows


def init(folder: Path) -> list[Path]:
    """Writes the app; returns its files. A folder with anything in it is left alone."""
    folder = folder.absolute()
    project = _name(folder)
    out = json.dumps(str(folder / "out" / "{run}"), ensure_ascii=False)  # a TOML string, too
    names = {
        # The SuperLink runs the app in another folder: only a whole path leads back here.
        '\nout = "out/{run}"': f"\nout = {out}",
        PROJECT: project,
        PACKAGE: project.replace("-", "_"),
    }

    def change(text: str) -> str:
        for old, new in names.items():
            text = text.replace(old, new)
        return text

    return write(TEMPLATE, folder, change)


def commands(folder: Path) -> tuple[str, str]:
    """What to type so that the app in the folder runs, on Flower's simulation engine.

    Without the first, Flower simulates two nodes; the size stays until it is changed again.
    """
    size = f"--num-supernodes {SUPERNODES} --client-resources-num-cpus 1"
    path = shlex.quote(str(folder.absolute()))
    return (
        f"flwr federation simulation-config @none/default {size}",
        f"flwr run {path} --stream",
    )


def _name(folder: Path) -> str:
    """A name that is valid for Flower, and as a package that no library has.

    Flower's simulation engine finds an app by its package's name, which two apps must not share.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower())
    plain = re.sub(r"(^[-0-9]+)|(-?app)?-?$", "", plain)
    return f"{plain[: LONGEST - 4].rstrip('-') or 'fedglad'}-app"
