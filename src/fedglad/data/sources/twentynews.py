"""20 Newsgroups "bydate": 18,846 Usenet posts of 1993 in 20 groups (Lang 1995), headers and all."""

from pathlib import Path
from typing import Any

import numpy as np

from fedglad.data.archives import walk
from fedglad.data.fetch import Folder, Web
from fedglad.data.sources import DataError, File, Recipe, of_npz, text_arrays

RAW = File(name="20news-bydate.npz")  # of either archive
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
    arrays: dict[str, Any] = {}
    for part, count in COUNTS.items():
        if len(posts[part]) != count:
            raise DataError(f"{archive.name} has {len(posts[part]):,} {part} posts, not {count:,}")
        ordered = sorted(posts[part])
        groups = sorted({group for group, _ in ordered})
        labels = [groups.index(group) for group, _ in ordered]
        arrays |= text_arrays(part, (posts[part][key] for key in ordered), labels)
    np.savez(folder / RAW.name, **arrays)


TAR_GZ = File(
    name="20news-bydate.tar.gz",
    checksum="sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
    convert=posts_of,
)
TAR_XZ = File(
    name="20news-bydate.tar.xz",
    checksum="sha256:9938a16fa7e6a1602cddcfc0d49637b2da83ffc79ce8c7a8e414bdc20ec4b51c",
    convert=posts_of,
)

RECIPE = Recipe(
    name="20news",
    about="Usenet posts, headers kept: 11,314 + 7,532 texts, 20 classes.",
    files=(RAW,),
    places=(
        Web(base="http://qwone.com/~jason/20Newsgroups/", packs=(TAR_GZ,)),
        Web(base="https://ndownloader.figshare.com/files/5975967", packs=(TAR_GZ,)),
        Folder(hint="20news-bydate.tar.xz, the same posts packed anew", packs=(TAR_XZ,)),
    ),
    prepare=lambda raw: of_npz(raw / RAW.name),
)
