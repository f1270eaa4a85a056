"""Which versions of Flower this was tried with: another is told, and not refused."""

from importlib.metadata import version

from fedglad.flower import log

TRIED = ("1.41", "1.42")


def told() -> str:
    """A warning of a version that was not tried, which is also logged; empty for one that was."""
    installed = version("flwr")
    if ".".join(installed.split(".")[:2]) in TRIED:
        return ""
    text = f"Flower {installed} is installed; fedglad was tried with {' and '.join(TRIED)}"
    log.warn("%s", text)
    return text
