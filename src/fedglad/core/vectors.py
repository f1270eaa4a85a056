"""One vector a file, written and read block by block, so that none of them is whole in memory.

The files are those of `checkpoint.write`, to the checksum: a safetensors file with one tensor. The
checksum is made of a block while it is in the cache, beside the writing or reading of it where
torch may use more than one thread.
"""

import json
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedglad.core.checkpoint import CheckpointError
from fedglad.core.files import replacing

STRETCH = 1 << 17  # elements that are worked on at a time
LARGE = 1 << 20  # bytes from which threads gain more than they cost
THREADS = 4  # at most: beyond them memory is what limits
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_MOST = 1 << 16  # bytes of a header with one tensor


def write(
    path: Path,
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    blocks: Iterable[Tensor],
    meta: Mapping[str, Any],
) -> None:
    """Writes a tensor that comes in blocks, in their order; the file is whole or not there.

    A block may be overwritten once the next is asked for. It is not synced to the disk.
    """
    text, size = json.dumps(meta), int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    about = {"dtype": DTYPES[dtype], "shape": [*shape], "data_offsets": [0, size]}

    def header(crc: int) -> bytes:
        saved = {"__metadata__": {"crc32": str(crc), "fedglad": text}, name: about}
        return json.dumps(saved, ensure_ascii=False, separators=(",", ":")).encode()

    length = -(-len(header(0xFFFFFFFF)) // 8) * 8  # the tensor begins at a multiple of 8
    crc = zlib.crc32(name.encode(), zlib.crc32(text.encode()))
    with (
        replacing(path, durable=False) as temporary,
        FileIO(temporary, "r+") as file,
        _helpers(int(torch.get_num_threads() > 1), size) as submit,
    ):
        os.fchmod(file.fileno(), 0o600)  # one client's update: nobody else's to read
        file.seek(8 + length)
        for block in blocks:
            data = _bytes(block)
            summed = submit(zlib.crc32, data, crc)
            write_all(file, data)
            crc = summed.result()
        if file.tell() != 8 + length + size:
            raise ValueError(f"the blocks have {file.tell() - 8 - length} bytes, not {size}")
        file.seek(0)
        write_all(file, length.to_bytes(8, "little") + header(crc).ljust(length))


class Reader:
    """A file with one vector, open from `Reader(path)` to `close`.

    | attribute | meaning |
    |---|---|
    | `name`, `dtype`, `shape` | of the tensor |
    | `meta` | the JSON that goes with it |

    CheckpointError says what is wrong with the file; that the vector is damaged is known when all
    of it was read, and `finish` is called.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            raise FileNotFoundError(f"there is no saved state at {path}")
        self._file = FileIO(path)
        try:
            self._open()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            self._file.close()
            raise self._damaged(str(error)) from error
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        length = int.from_bytes(self._file.read(8), "little")
        size = self._path.stat().st_size - 8 - length
        if not 0 < length <= _MOST or size < 0:
            raise ValueError("it is cut off, or no file with one vector")
        header = json.loads(self._file.read(length))
        about = header.pop("__metadata__")
        text, self._expected = about["fedglad"], about["crc32"]
        ((self.name, tensor),) = header.items()
        (self.dtype,) = (dtype for dtype, name in DTYPES.items() if name == tensor["dtype"])
        self.shape = tuple(tensor["shape"])
        if tensor["data_offsets"] != [0, size]:
            raise ValueError("it is cut off")
        self.meta: Any = json.loads(text)
        self._crc = zlib.crc32(self.name.encode(), zlib.crc32(text.encode()))

    def read(self, into: Tensor) -> None:
        """The next stretch of the vector, as long as `into`."""
        data = _bytes(into)
        left = memoryview(data)
        while left:
            count = self._file.readinto(left)
            if not count:
                raise self._damaged("it is cut off")
            left = left[count:]
        self._crc = zlib.crc32(data, self._crc)

    def finish(self) -> None:
        """Raises CheckpointError unless what was read is what was written."""
        if str(self._crc) != self._expected:
            raise self._damaged("its checksum does not match")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged, use an earlier one: {why}")


def together(
    readers: Sequence[Reader], size: int, workers: int
) -> Generator[tuple[slice, list[Tensor]]]:
    """Stretch after stretch of the vectors of some readers, which all have one size.

    With more than one worker, threads read the next stretch while one is worked on. What was given
    is overwritten when the next but one is asked for. After the last the checksums were compared.
    """
    wide = min(STRETCH, size)
    buffers = [[torch.empty(wide, dtype=reader.dtype) for reader in readers] for _ in range(2)]
    spans = [slice(at, min(at + STRETCH, size)) for at in range(0, size, STRETCH)]
    read = sum(size * reader.dtype.itemsize for reader in readers)
    workers = max(1, min(workers, THREADS, len(readers)))

    def read_some(some: Sequence[Reader], into: Sequence[Tensor]) -> None:
        for reader, buffer in zip(some, into, strict=True):
            reader.read(buffer)

    with _helpers(workers if workers > 1 else 0, read) as submit:

        def begin(place: int) -> tuple[list[Tensor], list[Future[None]]]:
            count = spans[place].stop - spans[place].start
            into = [buffer[:count] for buffer in buffers[place % 2]]
            parts = range(workers)
            return into, [submit(read_some, readers[k::workers], into[k::workers]) for k in parts]

        following = begin(0) if spans else None
        for place, span in enumerate(spans):
            assert following
            there, doing = following
            for one in doing:
                one.result()
            following = begin(place + 1) if place + 1 < len(spans) else None
            yield span, there
    for reader in readers:
        reader.finish()


@contextmanager
def _helpers(count: int, size: int) -> Generator[Callable[..., Future[Any]]]:
    """What calls a function in one of so many threads; at once, where threads gain nothing.

    They end with the block: none is there when a process forks later.
    """
    if not count or size < LARGE:
        yield _at_once
        return
    with ThreadPoolExecutor(count, thread_name_prefix="fedglad-vectors") as pool:
        yield pool.submit


def _at_once(function: Callable[..., Any], *args: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(function(*args))
    return done


def _bytes(block: Tensor) -> memoryview:
    flat = block.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Writes all of it, for a file may take less at a time."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
