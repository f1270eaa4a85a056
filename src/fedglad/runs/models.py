"""The models of a finished run, in files that plain PyTorch loads."""

from pathlib import Path

from fedglad.averages import NoAverage
from fedglad.core import checkpoint
from fedglad.server.server import Server


def write_models(folder: Path, server: Server, done: int, run: str) -> dict[str, str]:
    """Writes a server's model, and its average if it keeps one, into a folder.

    `done` is the number of rounds behind it and `run` the hash of the run's configuration; both
    stand in the files' headers. Returns the checksum of each file by its name.
    """
    states = {"model": server.state}
    if not isinstance(server.average, NoAverage):
        states["averaged"] = server.averaged
    checksums: dict[str, str] = {}
    for which, state in states.items():
        # A file does not hold one tensor under two names.
        tied = {alias: state[alias].clone() for alias in server.layout.aliases}
        path = folder / f"{which}.safetensors"
        meta = {"version": checkpoint.VERSION, "which": which, "round": done, "run": run}
        checkpoint.write(path, {**state, **tied}, meta)
        checksums[path.name] = checkpoint.checksum(path)
    return checksums
