"""Writes a complete Flower app into a folder, ready to run and to be changed."""

import json
import re
import shlex
from pathlib import Path

TEMPLATE = Path(__file__).parent / "template"
PACKAGE, PROJECT = "digits_app", "digits-app"  # the template's names, replaced in each app
SUPERNODES = 50
LONGEST = 32  # characters of an app's name that Flower allows


class InitError(ValueError):
    """A folder that an app cannot be written to; the message says what to do."""


def init(folder: Path) -> list[Path]:
    """Writes the app; returns its files. A folder with anything in it is left alone."""
    folder = folder.absolute()
    if folder.is_dir() and (there := sorted(path.name for path in folder.iterdir())):
        raise InitError(
            f"{folder} is not empty (it has {', '.join(there[:3])}{' …' if there[3:] else ''}): "
            "choose a new folder"
        )
    if folder.exists() and not folder.is_dir():
        raise InitError(f"{folder} is a file: choose a new folder")
    project = _name(folder)
    names = {PROJECT: project, PACKAGE: project.replace("-", "_")}
    out = json.dumps(str(folder / "out" / "{run}"), ensure_ascii=False)  # a TOML string, too
    written: list[Path] = []
    for source in sorted(TEMPLATE.rglob("*")):
        if source.suffix not in (".py", ".toml"):
            continue
        # The SuperLink runs the app in another folder: only a whole path leads back here.
        text = source.read_text("utf-8").replace('\nout = "out/{run}"', f"\nout = {out}")
        path = source.relative_to(TEMPLATE).as_posix()
        for old, new in names.items():
            path, text = path.replace(old, new), text.replace(old, new)
        written.append(folder / path)
        try:
            written[-1].parent.mkdir(parents=True, exist_ok=True)
            written[-1].write_text(text, "utf-8")
        except OSError as error:
            raise InitError(f"{written[-1]} cannot be written: {error.strerror}") from None
    return written


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
