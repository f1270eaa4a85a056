"""The clients' memories: files that are committed with the run's checkpoint.

What a client keeps from one of its rounds to the next (SCAFFOLD's c_k) is read and written by
whichever process trains it. A new memory is a proposal, kept only if the client's update was
accepted. Each file is named by the round after which it is valid: a run that goes back to a
checkpoint finds the memories of that moment.
"""

import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from fedglad.core import checkpoint, files

Vectors = dict[str, Tensor]

SHELF = 1000  # clients whose files share a folder
_FILE = re.compile(r"(\d+)\.(\d+)\.safetensors")
_PROPOSAL = re.compile(r"\d+\.\d+\.proposal|\.\d+\.\d+\.proposal\.\d+\.tmp")


class Memories:
    """Where every client's vectors are, and since which round; in a folder, or a temporary one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="fedglad-memories-"))
        self._versions: dict[int, list[int]] = {}  # of each client, ascending
        self._fresh: dict[int, Path] = {}  # the newest of each client, written since the last sync
        self._several: set[int] = set()  # clients with more than one version
        self._settled = self._saved = 0  # rounds: so far, and at the last sync

    def version(self, client: int) -> int:
        """The number of rounds after which the client's present memory was made; 0: it has none."""
        return self._versions.get(client, [0])[-1]

    def read(self, client: int, version: int) -> Vectors:
        """A client's memory; empty for version 0. OSError if it cannot be read."""
        try:
            return checkpoint.read(self._path(client, version))[0] if version else {}
        except checkpoint.CheckpointError as error:
            raise OSError(str(error)) from error

    def propose(self, client: int, t: int, memory: Vectors) -> None:
        """Writes what the client would remember of round t; nothing counts before `settle`."""
        path = self._proposal(client, t)
        path.parent.mkdir(parents=True, exist_ok=True)
        copies = {name: vector.contiguous().clone() for name, vector in memory.items()}
        checkpoint.write(path, copies, {}, sync=False)

    def proposed(self, client: int, t: int) -> Vectors:
        """What the client would remember of round t."""
        return checkpoint.read(self._proposal(client, t))[0]

    def settle(self, t: int, cohort: Collection[int], accepted: Collection[int]) -> None:
        """Makes the proposals of the accepted clients their memories, and drops the others."""
        kept = set(accepted)
        for client in dict.fromkeys(cohort):
            proposal, path = self._proposal(client, t), self._path(client, t + 1)
            if client not in kept:
                proposal.unlink(missing_ok=True)
            elif proposal.exists():
                proposal.replace(path)
                if self.version(client) > self._saved:  # no checkpoint has it: it is replaced
                    self._path(client, self._versions[client].pop()).unlink(missing_ok=True)
                self._note(client, t + 1)
                self._fresh[client] = path
        self._settled = t + 1
        if self._temporary:  # nobody goes back in it
            self.prune(t + 1)

    def sync(self) -> None:
        """Makes sure that all accepted memories are on the disk."""
        fresh = self._fresh.values()
        shelves = {path.parent for path in fresh}
        for path in [*fresh, *shelves, *([self.folder, self.folder.parent] if shelves else [])]:
            files.sync(path)
        self._fresh.clear()
        self._saved = self._settled

    def prune(self, oldest: int) -> None:
        """Drops what no checkpoint from round `oldest` on can ask for."""
        for client in tuple(self._several):
            versions = self._versions[client]
            while len(versions) > 1 and versions[1] <= oldest:
                self._path(client, versions.pop(0)).unlink(missing_ok=True)
            if len(versions) == 1:
                self._several.discard(client)

    def restore(self, t: int) -> None:
        """Goes back to the memories as they were after t rounds."""
        self._versions, self._fresh, self._several = {}, {}, set()
        self._settled = self._saved = t
        for path in self.folder.glob("*/*"):
            match = _FILE.fullmatch(path.name)
            if match and int(match[2]) <= t:
                self._note(int(match[1]), int(match[2]))
            elif match or _PROPOSAL.fullmatch(path.name):
                path.unlink()
        for versions in self._versions.values():
            versions.sort()

    def close(self) -> None:
        """Removes a temporary folder."""
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _note(self, client: int, version: int) -> None:
        versions = self._versions.setdefault(client, [])
        versions.append(version)
        if len(versions) > 1:
            self._several.add(client)

    def _path(self, client: int, version: int) -> Path:
        return self.folder / f"{client // SHELF:06d}" / f"{client}.{version}.safetensors"

    def _proposal(self, client: int, t: int) -> Path:
        return self._path(client, t).with_suffix(".proposal")
