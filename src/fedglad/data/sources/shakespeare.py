"""Shakespeare's plays as Project Gutenberg has them, 37 files of plain text: who says what.

A play is paragraphs between empty lines. The first line of a speech is the speaker, "HAMLET." or
"Ham.", alone; what stands in brackets is a direction to the players, and is left out. So are
headings of acts and scenes, prologues and epilogues without a speaker, the list of persons, and
what several say together.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedglad.data.sources import DataError, joined

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters: what a text may have; the character k of them has the id k + 1."""

ENDING = "_gut.txt"  # of the plays' files
DIRECTION = re.compile(r"[\[{][^\[\]]{0,1000}\]")
EMPTY = re.compile(r"\n[ \t]*\n")
BEGINNING = re.compile(r"^[ \t]*(act|scene|(the )?prologue|induction)\b", re.IGNORECASE | re.M)
BREAK = re.compile(
    r"(act|scene|(the )?prologue|epilogue|induction|dumb show|the order|the end)\b", re.IGNORECASE
)
BETWEEN = re.compile(r"(song|chorus|[ivx]+|spring|winter)\.?", re.IGNORECASE)  # in a speech
CAPITALS = re.compile(r"(?:\d\.? ?)?(?:[A-Z]\.? )?[A-Z]{2}[\w' .,&-]{0,40}")
NAME = re.compile(r"(?:\d |I )?[A-Z][a-z]*\.? ?(?:[A-Z][a-z]*|and)?\.? ?(?:[A-Z][a-z]*)?\.")
SEVERAL = re.compile(r"(ALL|BOTH|SOME)\b|.*(,|&|\bAND\b|\w{4}\. \w)")
INLINE = re.compile(r"([A-Z][A-Z' ]+)\. (?!and )(?=.*[a-z])(.+)")  # its first words beside it


def prepare(raw: Path) -> dict[str, np.ndarray]:
    """Every role's text and its name as bytes with their bounds, play by play."""
    texts: dict[str, str] = {}
    for path in sorted(raw.glob(f"*{ENDING}")):
        title = path.name.removesuffix(ENDING).replace("_", " ")
        said = roles(path.read_text("latin-1"))
        if not said:
            raise DataError(f"{path.name} has no speeches: it is no play, or laid out differently")
        texts |= {f"{title}: {role}": text for role, text in said.items()}
    content, at = joined(texts.values())
    names, names_at = joined(texts)
    return {"text": content, "text_at": at, "names": names, "names_at": names_at}


def roles(play: str) -> dict[str, str]:
    r"""What each role of a play says, its speeches in order, a line each line.

    >>> roles("ACT I.\n\nHAMLET.\nTo be, [He sighs.]\n\nor not.\n\nKING.\nHo!\n\nHAMLET. So?\n")
    {'HAMLET': 'To be,\nor not.\nSo?', 'KING': 'Ho!'}
    """
    said: dict[str, list[str]] = {}
    for role, lines in _speeches(play):
        if not SEVERAL.match(role):
            said.setdefault(role, []).extend(lines)
    known = str.maketrans("", "", "".join({*play} - {*CHARACTERS}))
    texts = {role: "\n".join(lines).translate(known) for role, lines in said.items()}
    return {role: text for role, text in texts.items() if text}


def _speeches(play: str) -> Iterator[tuple[str, list[str]]]:
    play = DIRECTION.sub("", play.replace("\r\n", "\n").expandtabs(1))
    start = BEGINNING.search(play)
    paragraphs = [
        [line for text in paragraph.split("\n") if (line := " ".join(text.split()))]
        for paragraph in EMPTY.split(play[start.start() :] if start else play)
    ]
    paragraphs = [lines for lines in paragraphs if lines]
    # Most plays have their speakers in capitals, some write "Ham.": never both.
    ways = Counter(
        way for lines in paragraphs for way in (CAPITALS, NAME) if _is_name(lines[0], way)
    )
    way = CAPITALS if ways[CAPITALS] >= ways[NAME] else NAME
    speakers = {_role(lines[0]) for lines in paragraphs if _is_name(lines[0], way)}
    role = ""
    for lines in paragraphs:
        if BREAK.match(lines[0]):
            role = ""
        elif BETWEEN.fullmatch(lines[0]) and role:
            yield role, lines[1:]
        elif (inline := INLINE.fullmatch(lines[0])) and inline[1] in speakers:
            role = inline[1]
            yield role, [inline[2], *lines[1:]]
        elif _is_name(lines[0], way) and (way is CAPITALS or len(lines) > 1):
            role = _role(lines[0])
            yield role, lines[1:]
        elif role:
            yield role, lines


def _is_name(line: str, way: re.Pattern[str]) -> bool:
    return bool(way.fullmatch(line)) and len(line.split()) <= 5 and not BREAK.match(line)


def _role(line: str) -> str:
    return line.rstrip(" .:-]").upper()
