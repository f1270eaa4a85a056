"""Checksums that files carry at their end, or in their header; to verify them needs no torch.

A JSON object ends with the key `crc`, a TOML file with a comment: the CRC-32 of all bytes before. A
reader that knows nothing of it sees one more key, or a comment. A file without one is from before
there were any. They show damage and careless edits; whoever means to deceive can write them anew.
"""

import json
import mmap
import re
import zlib
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["good", "no checksum", "damaged"]

_END = re.compile(rb'(?:,\s*"crc": "|# crc: )([0-9a-f]{8})(?:"\s*\})?\s*\Z')
_ROOM = 64  # bytes at the end in which a checksum lies
_MOST = 100_000_000  # bytes of a safetensors header, as the library has it


def crc(data: bytes) -> str:
    """The CRC-32 as eight digits.

    >>> crc(b"")
    '00000000'
    """
    return f"{zlib.crc32(data):08x}"


def json_with_crc(text: str) -> str:
    """The text of a JSON object with its checksum at the end.

    >>> json_with_crc('{"a": 1}')
    '{"a": 1, "crc": "7aa88204"}'
    """
    inner, _, end = text.rpartition("}")
    body = inner.rstrip()
    comma = ",\n  " if inner != body else ", "
    return f'{body}{comma}"crc": "{crc(body.encode())}"{inner[len(body) :]}}}{end}'


def toml_with_crc(text: str) -> str:
    """The text of a TOML file with its checksum in a last line.

    >>> toml_with_crc("a = 1\\n")
    'a = 1\\n# crc: af2fda68\\n'
    """
    return f"{text}# crc: {crc(text.encode())}\n"


def verify(data: bytes) -> Verdict:
    """Whether the bytes are those that were written, by the checksum at their end.

    >>> verify(b'{"a": 1, "crc": "7aa88204"}'), verify(b'{"a": 1}')
    ('good', 'no checksum')
    """
    start = max(0, len(data) - _ROOM)
    end = _END.search(data, start)
    if end is None:
        return "damaged" if b"crc" in data[start:] else "no checksum"
    return "good" if crc(data[: end.start()]) == end[1].decode() else "damaged"


def verify_tensors(path: Path) -> tuple[dict[str, Any], str]:
    """The JSON of a saved state, and its checksum, after all of the file was read and compared.

    ValueError says what is wrong with it, OSError that it cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size - 8
        if not 0 < length <= min(size, _MOST):
            raise ValueError("it is cut off, or no such file")
        try:
            header = json.loads(file.read(length))
            about = header.pop("__metadata__")
            text, expected = about["fedglad"], about["crc32"]
            spans = {name: header[name]["data_offsets"] for name in sorted(header)}
            if sum(end - begin for begin, end in spans.values()) != size - length:
                raise ValueError("it is cut off")
            made = zlib.crc32(text.encode())
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                content = memoryview(mapped)
                for name, (begin, end) in spans.items():
                    made = zlib.crc32(name.encode(), made)
                    with content[8 + length + begin : 8 + length + end] as part:
                        made = zlib.crc32(part, made)
                content.release()
            meta = json.loads(text)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is not a state saved by fedglad ({error!r})") from None
    if str(made) != expected:
        raise ValueError("its checksum does not match")
    if not isinstance(meta, dict):
        raise ValueError("it is not a state saved by fedglad")
    return meta, expected
