"""20 Newsgroups "bydate": 18,846 Usenet posts of 1993 in 20 groups (Lang 1995), headers and all."""

from pathlib import Path

import numpy as np

from fedglad.data.archives import walk
from fedglad.data.sources import DataError, text_arrays

COUNTS = {"train": 11_314, "test": 7_532}


def posts_of(folder: Path) -> None:
    """Lays the archive's files, one post each, as one array of bytes a part.

    Groups and files are in the order of their names, so that the numbers of classes are those
    that everybody uses. The posts are Latin-1, which has a character for every byte.
    """
    [archive] = folder.glob("20news-bydate.tar.*")
    posts: dict[str, dict[tuple[str, str], str]] = {part: {} for part in COUNTS}
    for path, content in walk(archive.name, archive):
        top, group, name = path.rsplit("/", 2)
        posts[top.removeprefix("20news-bydate-")][group, name] = content.read().decode("latin-1")
    arrays: dict[str, np.ndarray] = {}
    for part, count in COUNTS.items():
        if len(posts[part]) != count:
            raise DataError(f"{archive.name} has {len(posts[part]):,} {part} posts, not {count:,}")
        groups = sorted({group for group, _ in posts[part]})
        ordered = sorted(posts[part].items())
        arrays |= text_arrays(part, ((groups.index(key[0]), post) for key, post in ordered))
    np.savez(folder / "20news-bydate.npz", **arrays)  # pyright: ignore[reportArgumentType]
