"""Writes a complete app of an engine into a folder, ready to run and to be changed."""

from collections.abc import Callable
from pathlib import Path

SUFFIXES = (".py", ".toml", ".json")


class InitError(ValueError):
    """A folder that an app cannot be written to; the message says what to do."""


def write(template: Path, folder: Path, change: Callable[[str], str]) -> list[Path]:
    """Writes a template's files, texts and paths changed; a folder with anything is left alone."""
    folder = folder.absolute()
    if folder.is_dir() and (there := sorted(path.name for path in folder.iterdir())):
        raise InitError(
            f"{folder} is not empty (it has {', '.join(there[:3])}{' …' if there[3:] else ''}): "
            "choose a new folder"
        )
    if folder.exists() and not folder.is_dir():
        raise InitError(f"{folder} is a file: choose a new folder")
    written: list[Path] = []
    for source in sorted(template.rglob("*")):
        if source.suffix not in SUFFIXES:
            continue
        written.append(folder / change(source.relative_to(template).as_posix()))
        try:
            written[-1].parent.mkdir(parents=True, exist_ok=True)
            written[-1].write_text(change(source.read_text("utf-8")), "utf-8")
        except OSError as error:
            raise InitError(f"{written[-1]} cannot be written: {error.strerror}") from None
    return written
