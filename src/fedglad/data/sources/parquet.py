"""The strings of a Parquet file with one column, as Arrow writes it: Snappy, and dictionary pages.

Enough for a list of words, where a Parquet library would be a hundred times the size of the file.
https://github.com/apache/parquet-format, https://github.com/google/snappy
"""

from pathlib import Path
from typing import Any

import numpy as np

from fedglad.data.sources import DataError

PLAIN, RLE_DICTIONARY = 0, 8
DATA, DICTIONARY = 0, 2
SNAPPY = 1


class Reader:
    """Thrift's compact protocol: a struct is read as {field number: value}."""

    def __init__(self, content: bytes, at: int = 0) -> None:
        self.content, self.at = content, at

    def varint(self) -> int:
        """An unsigned integer, seven bits a byte, the lowest first."""
        value = shift = 0
        while True:
            byte = self.content[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def struct(self) -> dict[int, Any]:
        """Fields until the one that says stop."""
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            number = number + (head >> 4) if head >> 4 else self._signed()
            fields[number] = self._value(head & 15)
        return fields

    def _byte(self) -> int:
        self.at += 1
        return self.content[self.at - 1]

    def _signed(self) -> int:
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def _value(self, kind: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._signed()
            case 8:
                size = self.varint()
                self.at += size
                return self.content[self.at - size : self.at]
            case 9 | 10:
                head = self._byte()
                size = self.varint() if head >> 4 == 15 else head >> 4
                return [self._value(head & 15) for _ in range(size)]
            case 12:
                return self.struct()
            case _:
                raise DataError(f"a Parquet file with a field of type {kind}, which is not read")


def strings(path: Path) -> list[bytes]:
    """The values of the file's only column, as UTF-8."""
    content = path.read_bytes()
    if content[:4] != b"PAR1" or content[-4:] != b"PAR1":
        raise DataError(f"{path.name} is no Parquet file")
    size = int.from_bytes(content[-8:-4], "little")
    footer = Reader(content, len(content) - 8 - size).struct()
    found: list[bytes] = []
    for group in footer[4]:
        [column] = group[1]
        found += _chunk(content, column[3])
    return found


def _chunk(content: bytes, column: dict[int, Any]) -> list[bytes]:
    """All pages of a column chunk: a dictionary, perhaps, then values or their places in it."""
    if column[4] != SNAPPY:
        raise DataError(f"a Parquet file with codec {column[4]}, which is not read")
    reader = Reader(content, column.get(11, column[9]))
    known: list[bytes] = []
    found: list[bytes] = []
    while len(found) < column[5]:
        head = reader.struct()
        page = unsnapped(content[reader.at : reader.at + head[3]])
        reader.at += head[3]
        if head[1] == DICTIONARY:
            known = _plain(page, head[7][1])
        elif head[1] == DATA and head[5][2] in (PLAIN, RLE_DICTIONARY):
            page = page[4 + int.from_bytes(page[:4], "little") :]  # which values are null: none
            count = head[5][1]
            if head[5][2] == PLAIN:
                found += _plain(page, count)
            else:
                found += [known[k] for k in _hybrid(page[1:], page[0], count)]
        else:
            raise DataError(f"a Parquet page of type {head[1]}, which is not read")
    return found


def _plain(page: bytes, count: int) -> list[bytes]:
    """Each string after its length."""
    values: list[bytes] = []
    at = 0
    for _ in range(count):
        start = at + 4
        at = start + int.from_bytes(page[at:start], "little")
        values.append(page[start:at])
    return values


def _hybrid(page: bytes, width: int, count: int) -> list[int]:
    """Integers of `width` bits, in runs of one value or packed by eights."""
    reader, found = Reader(page), list[int]()
    while len(found) < count:
        head = reader.varint()
        size = (head >> 1) * width if head & 1 else (width + 7) // 8
        run = page[reader.at : reader.at + size]
        reader.at += size
        if head & 1:
            bits = np.unpackbits(np.frombuffer(run, np.uint8), bitorder="little")
            found += (bits.reshape(-1, width) @ (1 << np.arange(width))).tolist()
        else:
            found += [int.from_bytes(run, "little")] * (head >> 1)
    return found[:count]


def unsnapped(packed: bytes) -> bytes:
    """What Snappy packed: literals, and copies of what came before."""
    reader = Reader(packed)
    size, out = reader.varint(), bytearray()
    at = reader.at
    while at < len(packed):
        tag = packed[at]
        kind, more = tag & 3, tag >> 2
        at += 1
        if kind == 0:
            if more >= 60:
                extra = more - 59
                more = int.from_bytes(packed[at : at + extra], "little")
                at += extra
            out += packed[at : at + more + 1]
            at += more + 1
            continue
        if kind == 1:
            length, back = (more & 7) + 4, (tag >> 5) << 8 | packed[at]
            at += 1
        else:
            wide = 2 if kind == 2 else 4
            length, back = more + 1, int.from_bytes(packed[at : at + wide], "little")
            at += wide
        piece = out[len(out) - back : len(out) - back + length]
        while len(piece) < length:  # a copy may run into what it makes
            piece += piece[: length - len(piece)]
        out += piece
    if len(out) != size:
        raise DataError(f"{len(out):,} bytes were unpacked, and not {size:,}")
    return bytes(out)
