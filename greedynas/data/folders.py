"""Image folders: find the image files of every class, each real file once, and count the files that are left out.

Links are followed, because data sets are often made of them. A link to a parent folder, or to an image that the class
already has, would cause an infinite loop or duplicates: it is left out and counted.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from greedynas.runtime.errors import GreedyNASError

# The extensions that timm treats as images
EXTENSIONS = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm",
              ".pnm", ".jp2", ".avif", ".tga")  # fmt: skip
NAMED = 5  # names or extensions in one note

Identity = tuple[int, int]  # device and inode of a file or folder
Parts = tuple[str, ...]  # a path below the listed folder, from the name of the class folder on


@dataclass
class LeftOut:
    """The number of files that are left out for one reason, and the name of the first one."""

    count: int = 0
    first: str = ""

    def add(self, name: str) -> None:
        self.first = self.first if self.count else name
        self.count += 1


@dataclass
class Listing:
    """The image files below a folder of class folders."""

    files: list[Parts] = field(default_factory=list)  # of class folders, in the order of their names
    stray: list[str] = field(default_factory=list)  # images that are in no class folder
    empty: list[str] = field(default_factory=list)  # class folders without images
    unlisted: list[tuple[str, str]] = field(default_factory=list)  # folders that cannot be listed, and why
    extensions: Counter[str] = field(default_factory=Counter)  # of files that are not treated as images
    others: LeftOut = field(default_factory=LeftOut)  # the files with these extensions
    links: LeftOut = field(
        default_factory=LeftOut
    )  # links to files or folders that are already listed, or to a parent folder
    shared: LeftOut = field(default_factory=LeftOut)  # files that are in two classes by links

    def classes(self) -> list[str]:
        """Return the names of the classes that have images, in natural order."""
        return sorted({parts[0] for parts in self.files}, key=lambda name: (natural_key(name), name))

    def other_files(self) -> str:
        """Return a text about the files with other extensions: their number, the extensions, the first name."""
        if not self.others.count:
            return ""
        kinds = [f"{extension or 'none'} {count:,}" for extension, count in self.extensions.most_common()]
        one = self.others.count == 1
        return (
            f"{self.others.count:,} file{'' if one else 's'} with {'another extension' if one else 'other extensions'} "
            f"({some(kinds)}), the first: {self.others.first}"
        )

    def notes(self) -> list[str]:
        """Return one sentence for each kind of file that was left out or is suspicious."""
        notes = [f"left out: {self.other_files()}"] if self.others.count else []
        if self.unlisted:
            named = some([f"{name} ({why})" for name, why in self.unlisted])
            notes.append(f"left out: {len(self.unlisted):,} folder(s) that cannot be listed: {named}")
        if self.links.count:
            notes.append(
                f"left out: {self.links.count:,} link(s) to images or folders that are already counted, "
                f"the first: {self.links.first}"
            )
        if self.shared.count:
            notes.append(f"{self.shared.count:,} image file(s) are in two classes, the first: {self.shared.first}")
        return notes


def list_images(folder: str) -> Listing:
    """Return the images at any depth below each class folder, in the same order of names on every machine.

    Names that start with a dot are ignored. Raises OSError if the folder itself cannot be listed.
    """
    listing = Listing()
    above = _folders_above(folder)
    identities: list[Sequence[Identity]] = []
    with os.scandir(folder) as entries:
        visible = sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    for entry in visible:
        if not entry.is_dir():
            if not _sort_by_extension(listing, (entry.name,)):
                listing.stray.append(_shown((entry.name,)))
            continue
        _refuse_name(entry.name, folder)
        walk = _Walk(folder, entry.name, set(above), listing)
        files, found = walk.run()
        if not files and not walk.loop:
            listing.empty.append(entry.name)
        listing.files += files
        identities.append(found)
    _note_shared(listing, identities)
    order = sorted(range(len(listing.files)), key=listing.files.__getitem__)
    listing.files = [listing.files[i] for i in order]
    return listing


class _Walk:
    """A walk through one class folder."""

    def __init__(self, folder: str, name: str, seen: set[Identity], listing: Listing) -> None:
        self.folder, self.listing, self.seen = folder, listing, seen
        self.folders: list[Parts] = [(name,)]
        self.linked_folders: list[
            Parts
        ] = []  # listed last, so that files that are reached without a link keep their own names
        self.files: list[tuple[Parts, Identity]] = []
        self.linked_files: list[Parts] = []
        self.loop = False  # whether the class folder itself is a link to a parent folder

    def run(self) -> tuple[list[Parts], list[Identity]]:
        """Return the image files, and the device and inode of each."""
        while self.folders or self.linked_folders:
            self._list((self.folders or self.linked_folders).pop())
        identities: dict[Identity, Parts] = {}
        found: list[Parts] = []
        kept: list[Identity] = []
        # Some file systems return different inodes in a listing and in a stat: if there are links, stat all files.
        stat_all = bool(self.linked_files)
        for parts, identity in sorted(self.files):
            self._keep(parts, self._stat(parts) if stat_all else identity, identities, found, kept)
        for parts in sorted(self.linked_files):
            self._keep(parts, self._stat(parts), identities, found, kept)
        return found, kept

    def _list(self, parts: Parts) -> None:
        path = os.path.join(self.folder, *parts)  # noqa: PTH118
        try:
            status = os.stat(path)  # noqa: PTH116
            if (status.st_dev, status.st_ino) in self.seen:
                self.listing.links.add(_shown(parts))
                self.loop = self.loop or len(parts) == 1
                return
            self.seen.add((status.st_dev, status.st_ino))
            with os.scandir(path) as entries:
                visible = sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
        except OSError as error:
            self.listing.unlisted.append((_shown(parts), error.strerror or str(error)))
            return
        for entry in reversed(visible):  # the last one on the stack is listed first
            inner = (*parts, entry.name)
            if _is_folder(entry):
                (self.linked_folders if entry.is_symlink() else self.folders).append(inner)
        for entry in visible:
            inner = (*parts, entry.name)
            if _is_folder(entry) or _sort_by_extension(self.listing, inner):
                continue
            if entry.is_symlink():
                self.linked_files.append(inner)
            else:
                self.files.append((inner, (status.st_dev, entry.inode())))

    def _stat(self, parts: Parts) -> Identity:
        try:
            status = os.stat(os.path.join(self.folder, *parts))  # noqa: PTH116, PTH118
        except OSError:  # a broken link stays in the list, and is reported as unreadable
            return 0, 0
        return status.st_dev, status.st_ino

    def _keep(
        self, parts: Parts, identity: Identity, known: dict[Identity, Parts], found: list[Parts], kept: list[Identity]
    ) -> None:
        if identity[1] != 0 and known.setdefault(identity, parts) != parts:
            self.listing.links.add(_shown(parts))
            return
        found.append(parts)
        kept.append(identity)


def _folders_above(folder: str) -> set[Identity]:
    """Return the identities of the folder and of all its parents, by its name and by its real path."""
    found = set()
    for path in {os.path.abspath(folder), os.path.realpath(folder)}:  # noqa: PTH100
        while True:
            status = os.stat(path)  # noqa: PTH116
            found.add((status.st_dev, status.st_ino))
            if (parent := os.path.dirname(path)) == path:  # noqa: PTH120
                break
            path = parent
    return found


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _sort_by_extension(listing: Listing, parts: Parts) -> bool:
    """Return whether a file is an image by its extension; count it otherwise. Only files of classes are counted."""
    extension = os.path.splitext(parts[-1])[1].lower()  # noqa: PTH122
    if extension in EXTENSIONS:
        return False
    if len(parts) > 1:
        listing.extensions[_shown((extension,))] += 1
        listing.others.add(_shown(parts))
    return True


def _note_shared(listing: Listing, identities: Sequence[Sequence[Identity]]) -> None:
    """Note the files that are in two classes by links, and so have two labels."""
    keys = np.array([identity for found in identities for identity in found], np.uint64).reshape(-1, 2)
    order = np.lexsort(keys.T)  # the sort is stable: among equal ones, the first class comes first
    equal = (keys[order[1:]] == keys[order[:-1]]).all(axis=1) & (keys[order[1:], 1] != 0)
    for place in np.flatnonzero(equal).tolist():
        names = [_shown(listing.files[order[i]]) for i in (place, place + 1)]
        listing.shared.add(" and ".join(names))


def _refuse_name(name: str, folder: str) -> None:
    """Raise for the name of a class that JSON, YAML and ONNX files could not hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise GreedyNASError(
            f"the name of the class folder {_shown((name,))} in {shown_path(folder)} is not UTF-8: rename it"
        ) from None


def natural_key(name: str) -> list[int | str]:
    """Return a key that sorts numbers in names by their value, as timm does."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name.lower())]


def shown_path(path: str | bytes) -> str:
    """Return a path as printable text: bytes that are not UTF-8 are written as \\xNN."""
    return os.fsencode(path).decode("utf-8", errors="backslashreplace")


def some(names: Sequence[str], most: int = NAMED) -> str:
    """Return the first few names as text, with the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _shown(parts: Parts) -> str:
    return shown_path("/".join(parts))
