"""Unusual contents of image folders: circular links, pipes, names that are not UTF-8, files of other kinds."""

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from greedynas.data.folders import EXTENSIONS, list_images, natural_key
from greedynas.data.settings import DataSettings
from greedynas.jobs.probe import look_at
from greedynas.runtime.errors import GreedyNASError
from tests.helpers.pictures import opened, paint, picture, spoil
from tests.helpers.privileges import like_anybody


@pytest.fixture(autouse=True)
def _ends():
    """Check that reading ends soon, whatever a folder holds."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(30)
    yield
    signal.alarm(0)


def names(folder):
    return ["/".join(parts) for parts in list_images(str(folder)).files]


def noted(data, *words):
    """Return the note that has all these words."""
    found = [note for note in data.notes if all(word in note for word in words)]
    assert len(found) == 1, data.notes
    return found[0]


def test_the_order_is_the_same_as_in_earlier_versions(tmp_path):
    """Check that runs that were started with timm's lister find their images in the same order."""
    from timm.data import create_dataset
    from timm.utils.misc import natural_key as timms

    paint(tmp_path, {"b 10/x": 3, "b 9": 3, "B": 12, "b 10": 2, "é": 2, "10": 2})
    picture(0).save(tmp_path / "B" / "0.JPEG")
    found = create_dataset("", root=str(tmp_path), search_split=False, input_key=";".join(EXTENSIONS))
    files = sorted(Path(file).relative_to(tmp_path).parts for file, _ in found.reader.samples)
    assert names(tmp_path) == ["/".join(parts) for parts in files]
    assert list_images(str(tmp_path)).classes() == ["10", "B", "b 9", "b 10", "é"]
    for name in ("b10x", "IMG_002", "", "7"):
        assert natural_key(name) == timms(name)


# Links


def test_loops_end_and_every_image_is_counted_once(tmp_path):
    paint(tmp_path / "train", {"a": 6, "b": 6})
    paint(tmp_path / "test", {"a": 2, "b": 2}, first=1)
    plain = opened(tmp_path, 8, 3, val_images=2)
    for i in range(6):  # following this number of links would lead to millions of files
        (tmp_path / "train" / "a" / f"up {i}").symlink_to(tmp_path)
        (tmp_path / "train" / "a" / f"here {i}").symlink_to(".")
    (tmp_path / "train" / "a" / "first.png").symlink_to("0.png")
    (tmp_path / "train" / "a" / "0 hard.png").hardlink_to(tmp_path / "train" / "a" / "0.png")
    data = opened(tmp_path, 8, 3, val_images=2)
    assert (len(data.train), len(data.val), len(data.test())) == (10, 2, 4)
    assert "14 link(s) to images or folders that are already counted" in noted(data, "already counted")
    if "a/0 hard.png" not in names(tmp_path / "train"):  # of two hard links, the first name is kept
        assert data.identity()["digest"] == plain.identity()["digest"]


def test_files_that_are_reached_without_a_link_keep_their_names(tmp_path):
    paint(tmp_path, {"a/real": 3, "b": 3})
    (tmp_path / "a" / "first").symlink_to("real")
    (tmp_path / "a" / "real" / "!.png").symlink_to("1.png")
    assert names(tmp_path) == ["a/real/0.png", "a/real/1.png", "a/real/2.png", "b/0.png", "b/1.png", "b/2.png"]


def test_links_to_other_places_are_followed(tmp_path):
    paint(tmp_path / "store", {"x": 4, "y": 4})
    (tmp_path / "set" / "a").mkdir(parents=True)
    (tmp_path / "set" / "b").symlink_to(tmp_path / "store" / "y")
    for i in range(3):
        (tmp_path / "set" / "a" / f"{i}.png").symlink_to(tmp_path / "store" / "x" / f"{i}.png")
    (tmp_path / "set" / "a" / "again.png").symlink_to(tmp_path / "store" / "x" / "1.png")
    assert names(tmp_path / "set") == ["a/0.png", "a/1.png", "a/2.png", "b/0.png", "b/1.png", "b/2.png", "b/3.png"]


def test_a_link_to_a_parent_folder_is_not_a_class(tmp_path):
    paint(tmp_path, {"a": 8, "b": 8})
    (tmp_path / "all").symlink_to(".")
    (tmp_path / "up").symlink_to("..")
    data = opened(tmp_path, 8, 3, val_images=2)
    assert data.class_names == ["a", "b"]
    assert "2 link(s)" in noted(data, "already counted")


def test_images_in_two_classes_are_noted(tmp_path):
    paint(tmp_path, {"a": 8, "b": 8})
    (tmp_path / "b" / "other.png").symlink_to("../a/3.png")
    (tmp_path / "b" / "hard.png").hardlink_to(tmp_path / "a" / "4.png")
    data = opened(tmp_path, 8, 3, val_images=2)
    assert "2 image file(s) are in two classes, the first: a/3.png and b/other.png" in noted(data, "two classes")


# Special files


def strange(folder):
    """Create files that block forever, never end, or are broken links, all named like images."""
    os.mkfifo(folder / "pipe.png")
    (folder / "link to a pipe.png").symlink_to("pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "nowhere.png").symlink_to("gone.png")
    (folder / "messages.png").symlink_to("/proc/kmsg")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()  # noqa: PTH109
        os.chdir(folder)  # the name of a socket is short
        try:
            server.bind("socket.png")
        finally:
            os.chdir(here)
    return ["pipe.png", "zero.png", "nowhere.png", "messages.png", "socket.png"]


def test_pipes_devices_and_sockets_are_never_opened(tmp_path):
    for name, count in (("train", 10), ("test", 5)):
        paint(tmp_path / name, {"a": count, "b": count}, first=count)
    for i in range(3):
        shutil.copy(tmp_path / "train" / "b" / f"{i}.png", tmp_path / "test" / "a" / f"copy{i}.png")
    found = strange(tmp_path / "train" / "a")
    strange(tmp_path / "test" / "b")
    assert look_at(DataSettings(source=str(tmp_path)), seed=0).looked_at == 20
    data = opened(tmp_path, 8, 3, val_images=12)
    assert len(data.train) + len(data.val) == 20
    for name in found:
        assert noted(data, "skipped, unreadable", f"/{name} (")
    # They do not prevent the check for copies.
    assert noted(data, "3 of 18 test images are exact copies")
    assert len(data.test()) == 13
    assert sum(digest == "" for digest in data.manifest.hashes) == 8  # all but /proc/kmsg, whose size is 0
    for name in ("messages.png", "nowhere.png"):  # they come first
        (tmp_path / "train" / "a" / name).unlink()
    with pytest.raises(
        GreedyNASError, match=r"cannot read .*pipe\.png: it is not a regular file but a pipe, a device, a socket"
    ):
        opened(tmp_path, 8, 3, unreadable="refuse")
    streaming = opened(tmp_path, 8, 3, memory_gb=0)
    assert "cannot be read and were not compared" in noted(streaming, "3 of 18 test images are exact copies")
    assert len(next(streaming.train.train_batches(0, 16))[0]) == 16


def test_one_unreadable_file_does_not_disable_the_check_for_copies(tmp_path):
    for name, count in (("train", 10), ("test", 5)):
        paint(tmp_path / name, {"a": count, "b": count}, first=count)
    shutil.copy(tmp_path / "train" / "b" / "1.png", tmp_path / "test" / "a" / "copy.png")
    lost = tmp_path / "test" / "a" / "2.png"
    shutil.copy(tmp_path / "train" / "a" / "2.png", lost)  # with the same size as a file on the other side
    lost.chmod(0)
    with like_anybody():
        data = opened(tmp_path, 8, 3)
    note = noted(data, "1 of 11 test images are exact copies")
    assert f"1 files cannot be read and were not compared, the first: {lost}" in note


# Files that are left out


def test_other_extensions_are_counted_and_named(tmp_path):
    paint(tmp_path, {"a": 8, "b": 8})
    for name in ("a/2.heic", "a/1.HEIC", "b/x.heic", "b/scan", "b/notes.txt", "b/.DS_Store", "labels.csv"):
        (tmp_path / name).write_bytes(b"x")
    data = opened(tmp_path, 8, 3, val_images=2)
    note = noted(data, "other extensions")
    assert "left out: 5 files with other extensions (.heic 3, .txt 1, none 1), the first: a/1.HEIC" in note


def test_the_error_for_a_class_without_images_names_its_extensions(tmp_path):
    paint(tmp_path, {"a": 8, "b": 8})
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "1.heic").write_bytes(b"x")
    with pytest.raises(GreedyNASError, match=r"no images of class c .*1 file with another extension \(\.heic 1\)"):
        opened(tmp_path, 8, 3)
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(GreedyNASError, match=r"no images in .*another extension \(\.heic 1\), the first: c/1\.heic"):
        opened(tmp_path, 8, 3)


def test_folders_that_cannot_be_listed_are_named_or_refused(tmp_path):
    paint(tmp_path, {"a": 8, "b": 8, "b/private": 3})
    (tmp_path / "b" / "private").chmod(0)
    with like_anybody():
        data = opened(tmp_path, 8, 3, val_images=2)
        with pytest.raises(GreedyNASError, match=r"cannot list .*b/private: Permission denied; repair it"):
            opened(tmp_path, 8, 3, val_images=2, unreadable="refuse")
    (tmp_path / "b" / "private").chmod(0o755)
    assert len(data.train) + len(data.val) + len(data.test()) == 16
    assert "1 folder(s) that cannot be listed: b/private (Permission denied)" in noted(data, "cannot be listed")


# Names that are not UTF-8


def test_a_class_whose_name_is_not_utf8_is_refused_before_training(run_cli, tmp_path):
    paint(tmp_path / "photos", {"a": 8, "b": 8})
    os.rename(tmp_path / "photos" / "b", os.fsencode(tmp_path / "photos") + b"/caf\xe9")  # noqa: PTH104
    code, _, err = run_cli("train", "cifar10", "--data", tmp_path / "photos", "--out", tmp_path / "run")
    assert code == 2
    assert err.startswith(
        f"error: the name of the class folder caf\\xe9 in {tmp_path / 'photos'} is not UTF-8: rename it"
    )
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_other_names_that_are_not_utf8_are_accepted(tmp_path):
    """Check names of files, of folders below those of classes, and of the whole folder."""
    root = os.fsdecode(os.fsencode(tmp_path) + b"/fotos \xe9")
    folder = tmp_path / "photos"
    paint(folder, {"a": 8, "b": 8})
    os.mkdir(os.fsencode(folder) + b"/b/caf\xe9")  # noqa: PTH102
    for i in range(3):
        os.rename(folder / "b" / f"{i}.png", os.fsencode(folder) + b"/b/caf\xe9/%d\xff.png" % i)  # noqa: PTH104
    (folder / "b" / "7.png").rename(os.fsdecode(os.fsencode(folder) + b"/b/\xfe.png"))
    spoil(next(file for file in (folder / "b").iterdir() if os.fsencode(file).endswith(b"\xfe.png")))
    folder.rename(root)
    data = opened(root, 8, 3, val_images=2)
    assert len(data.train) + len(data.val) + len(data.test()) == 15
    for note in data.notes:
        note.encode()
    assert noted(data, "skipped, unreadable", "\\xfe.png")
