"""The clients' memories: files that are committed with the run's checkpoint.

What a client keeps from one of its rounds to the next (SCAFFOLD's c_k) is read and written by
whichever process trains it. A new memory is a proposal, kept only if the client's update was
accepted. Each file is named by the round after which it is valid: a run that goes back to a
checkpoint finds the memories of that moment.
"""

import re
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedglad.core import checkpoint, checksums, files

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedglad.core.vectors import Reader

Vectors = dict[str, "Tensor"]

SHELF = 1000  # clients whose files share a folder
VERSIONS = 3  # of a client in a run's folder: of the last two checkpoints, and the newest
_FILE = re.compile(r"(\d+)\.(\d+)\.safetensors")
_PROPOSAL = re.compile(r"\d+\.\d+\.proposal")


class Memories:
    """Where every client's vectors are, and since which round; in a folder, or a temporary one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="fedglad-memories-"))
        self._versions: dict[int, list[int]] = {}  # of each client, ascending
        self._fresh: dict[int, Path] = {}  # the newest of each client, written since the last sync
        self._several: set[int] = set()  # clients with more than one version
        self._settled = self._saved = 0  # rounds: so far, and at the last sync

    @property
    def versions(self) -> int:
        """How many of one client there may be between two rounds."""
        return 1 if self._temporary else VERSIONS

    def version(self, client: int) -> int:
        """The number of rounds after which the client's present memory was made; 0: it has none."""
        return self._versions.get(client, [0])[-1]

    def read(self, client: int, version: int) -> Vectors:
        """A client's memory; empty for version 0. OSError if it cannot be read."""
        try:
            return self._read(self._path(client, version), client, version) if version else {}
        except checkpoint.CheckpointError as error:
            raise OSError(str(error)) from error

    def propose(self, client: int, t: int, memory: Vectors) -> None:
        """Writes what the client would remember of round t; nothing counts before `settle`."""
        from fedglad.core import vectors

        if len(memory) == 1:
            ((name, vector),) = memory.items()
            if vector.dtype in vectors.DTYPES:
                blocks = vector.reshape(-1).split(vectors.STRETCH)
                self.propose_blocks(client, t, name, vector.shape, vector.dtype, blocks)
                return
        copies = {name: vector.contiguous().clone() for name, vector in memory.items()}
        checkpoint.write(self._new(client, t), copies, _meta(client, t), sync=False)

    def propose_blocks(
        self,
        client: int,
        t: int,
        name: str,
        shape: Sequence[int],
        dtype: "torch.dtype",
        blocks: "Iterable[Tensor]",
    ) -> None:
        """Writes one vector that comes in blocks, as `propose` would with all of them."""
        from fedglad.core import vectors

        vectors.write(self._new(client, t), name, shape, dtype, blocks, _meta(client, t))

    def proposed(self, client: int, t: int) -> Vectors:
        """What the client would remember of round t."""
        return self._read(self._proposal(client, t), client, t + 1)

    def opened(self, client: int, version: int) -> "Reader":
        """A client's memory that is one vector, to be read block by block; who asks closes it."""
        return self._open(self._path(client, version), client, version)

    def opened_proposal(self, client: int, t: int) -> "Reader":
        """The same of what the client would remember of round t."""
        return self._open(self._proposal(client, t), client, t + 1)

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

    def prune(self, oldest: int, kept: Collection[int] = ()) -> None:
        """Drops what no checkpoint from round `oldest` on can ask for, nor those kept before it."""
        for client in tuple(self._several):
            versions = self._versions[client]
            first, *needed = (bisect_right(versions, done) - 1 for done in (oldest, *kept))
            for place in sorted(set(range(first)) - set(needed), reverse=True):
                self._path(client, versions.pop(place)).unlink(missing_ok=True)
            if len(versions) == 1:
                self._several.discard(client)

    def needed(self) -> dict[str, list[int]]:
        """The clients that have a memory, by the round after which it was made: JSON types."""
        clients: dict[str, list[int]] = {}
        for client in sorted(self._versions):
            clients.setdefault(str(self.version(client)), []).append(client)
        return clients

    def problem(self, needed: Mapping[str, Sequence[int]]) -> str:
        """What is lost or damaged of these memories, all of them read; empty if nothing is."""
        wrong: list[str] = []
        for client, version in as_pairs(needed):
            if reason := problem_of(self._path(client, version), client, version):
                wrong.append(f"the memory of client {client} is {reason}")
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"{wrong[0]}{more}" if wrong else ""

    def restore(self, t: int, needed: Mapping[str, Sequence[int]] | None = None) -> None:
        """Goes back to the memories as they were after t rounds: those needed, where that is known,
        and what was before them."""
        self._versions, self._fresh, self._several = {}, {}, set()
        self._settled = self._saved = t
        newest = None if needed is None else dict(as_pairs(needed))
        for path in self.folder.glob("*/*"):
            match = _FILE.fullmatch(path.name)
            last = t if newest is None or not match else newest.get(int(match[1]), 0)
            if match and int(match[2]) <= last:
                self._note(int(match[1]), int(match[2]))
            elif match or _PROPOSAL.fullmatch(path.name):
                path.unlink()
        for versions in self._versions.values():
            versions.sort()
        for shelf in self.folder.glob("*/"):
            for left in files.leftovers(shelf):
                left.unlink()

    def close(self) -> None:
        """Removes a temporary folder."""
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, path: Path, client: int, version: int) -> Vectors:
        vectors, meta = checkpoint.read(path)
        if not _is_of(meta, client, version):
            raise _mistaken(path, meta)
        return vectors

    def _open(self, path: Path, client: int, version: int) -> "Reader":
        from fedglad.core.vectors import Reader

        reader = Reader(path)
        if not _is_of(reader.meta, client, version):
            reader.close()
            raise _mistaken(path, reader.meta)
        return reader

    def _new(self, client: int, t: int) -> Path:
        """Where a proposal goes, in a folder that is there."""
        path = self._proposal(client, t)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _note(self, client: int, version: int) -> None:
        versions = self._versions.setdefault(client, [])
        versions.append(version)
        if len(versions) > 1:
            self._several.add(client)

    def _path(self, client: int, version: int) -> Path:
        return path_of(self.folder, client, version)

    def _proposal(self, client: int, t: int) -> Path:
        return self._path(client, t).with_suffix(".proposal")


def as_pairs(needed: Mapping[str, Sequence[int]]) -> list[tuple[int, int]]:
    """(client, round) of what `Memories.needed` gives; raises for anything else."""
    pairs = [(client, int(version)) for version, some in needed.items() for client in some]
    return [(checkpoint.whole_number(client), version) for client, version in pairs]


def path_of(folder: Path, client: int, version: int) -> Path:
    """Where a client's memory lies, of the round after which it is valid."""
    return folder / f"{client // SHELF:06d}" / f"{client}.{version}.safetensors"


def problem_of(path: Path, client: int, version: int) -> str:
    """What is wrong with a memory, all of it read: "missing", or "damaged" and why; or empty."""
    try:
        meta, _ = checksums.verify_tensors(path)
    except FileNotFoundError:
        return "missing"
    except (ValueError, OSError) as error:
        return f"damaged: {error}"
    return "" if _is_of(meta, client, version) else f"damaged: it is {_whose(meta)}"


def _is_of(meta: Mapping[str, Any], client: int, version: int) -> bool:
    """Whether it is the memory that it should be; those of earlier versions do not say."""
    return not meta or (meta.get("client"), meta.get("after")) == (client, version)


def _meta(client: int, t: int) -> dict[str, Any]:
    return {"client": int(client), "after": t + 1}


def _mistaken(path: Path, meta: Mapping[str, Any]) -> checkpoint.CheckpointError:
    return checkpoint.CheckpointError(f"{path} is damaged: it is {_whose(meta)}")


def _whose(meta: Mapping[str, Any]) -> str:
    return f"that of client {meta.get('client')} after {meta.get('after')} rounds"
