"""A run is resumed with the images it was started with, wherever they are, or one line says what has changed."""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from rich.console import Console

from greedynas.data import sources
from greedynas.data.datasets import open_data
from greedynas.data.manifest import FILE, read_manifest, write_manifest
from greedynas.data.settings import DataSettings
from greedynas.data.sources import END_BYTES
from greedynas.greedy import steps
from greedynas.jobs.resolving import load_config, settings_of
from greedynas.runtime.errors import GreedyNASError
from greedynas.settings.schema import Asked
from greedynas.stages import train
from greedynas.stages.run import Run
from tests.helpers.kill_points import differences, outcome
from tests.helpers.paths import ROOT
from tests.helpers.pictures import CPU, opened, paint, picture
from tests.helpers.privileges import like_anybody
from tests.helpers.ranks import TINY
from tests.helpers.ranks import outcome as finish
from tests.helpers.shards import write_shard
from tests.helpers.training import SETTINGS, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")

SPACE = tiny_space(repeat=1)


class Stop(BaseException):
    """An interruption."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Create images with three sets, a configuration, an interrupted run and a complete one."""
    home = tmp_path_factory.mktemp("home")
    for i, (name, count) in enumerate({"train": 12, "val": 4, "test": 3}.items()):
        paint(home / "photos" / name, {"a": count, "b": count, "c": count}, first=i, size=(10, 9))
    picture(5, (10, 9)).save(home / "photos" / "train" / "a" / "pixel.bmp")
    settings = {
        "space": SPACE.model_dump(mode="json"),
        "data": {"workers": 0, "pad": 1},
        "train": {**SETTINGS, "max_epochs": 2, "checkpoint_steps": 2, "accuracy_images": 4},
    }
    (home / "tiny.yaml").write_text(yaml.safe_dump(settings))
    config = load_config(home / "tiny.yaml", {"data.source": str(home / "photos")})
    train.train_stage(config, home / "whole", Console(quiet=True), show_plan=False)
    step, done = steps.train_step, []

    def stopped(*arguments):
        done.append(1)
        if len(done) == 4:
            raise Stop
        return step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "train_step", stopped)
        with pytest.raises(Stop):
            train.train_stage(config, home / "interrupted", Console(quiet=True), show_plan=False)
    return home


@pytest.fixture
def place(home, tmp_path):
    """Create copies of the images and of the interrupted run."""
    shutil.copytree(home / "photos", tmp_path / "photos")
    shutil.copytree(home / "interrupted", tmp_path / "run")
    return tmp_path


# Changes: each takes the folder of the images, and may return its new name as a string


def swap(first, second):
    first.rename(first.with_name("aside"))
    second.rename(first)
    first.with_name("aside").rename(second)


def replace_all(photos):
    for i, file in enumerate(sorted(photos.rglob("*.png"))):
        picture([99, i], (10, 9)).save(file)


def make_test_of_train(photos):
    shutil.rmtree(photos / "test")
    shutil.copytree(photos / "train", photos / "test")


def put_train_into_test(photos):
    for file in (photos / "test").rglob("*.png"):
        shutil.copy(photos / "train" / file.relative_to(photos / "test"), file)


def rename_two(photos):
    for name in ("3.png", "7.png"):
        (photos / "train" / "b" / name).rename(photos / "train" / "b" / f"x{name}")


def change_a_pixel(photos):
    file = photos / "train" / "a" / "pixel.bmp"
    status, data = file.stat(), bytearray(file.read_bytes())
    data[-7] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size


def truncate(photos):
    file = photos / "val" / "c" / "1.png"
    file.write_bytes(file.read_bytes()[:-20])


def append(photos):
    with (photos / "train" / "c" / "1.png").open("ab") as file:
        file.write(b"\0")


def rename_class(photos):
    for name in ("train", "val", "test"):
        (photos / name / "b").rename(photos / name / "z")


def become_a_pipe(photos):
    (photos / "train" / "a" / "1.png").unlink()
    os.mkfifo(photos / "train" / "a" / "1.png")


def list_in_another_order(photos):
    for folder in [folder for folder in photos.rglob("?") if folder.is_dir()]:
        folder.rename(folder.with_name("aside"))
        folder.mkdir()
        for file in sorted(folder.with_name("aside").iterdir(), reverse=True):
            shutil.copy2(file, folder / file.name)
        shutil.rmtree(folder.with_name("aside"))


def touch(photos):
    for file in photos.rglob("*.png"):
        os.utime(file, (10**9, 10**9))


def become_links(photos):
    elsewhere = photos.parent / "elsewhere"
    shutil.copytree(photos / "train" / "a", elsewhere)
    for file in elsewhere.iterdir():
        (photos / "train" / "a" / file.name).unlink()
        (photos / "train" / "a" / file.name).symlink_to(file)


def become_a_linked_class(photos):
    shutil.move(photos / "train" / "c", photos.parent / "elsewhere")
    (photos / "train" / "c").symlink_to(photos.parent / "elsewhere")


def link_in_circles(photos):
    (photos / "train" / "a" / "again").symlink_to(photos / "train")
    (photos / "train" / "a" / "self").symlink_to("self")
    (photos / "train" / "b" / "same").symlink_to(photos / "train" / "b")
    (photos / "train" / "b" / "5 again.png").symlink_to("5.png")
    os.link(photos / "test" / "b" / "1.png", photos / "test" / "b" / "hard.png")


def move(photos):
    return str(photos.rename(photos.with_name("other place")))


def link_root(photos):
    photos.rename(photos.with_name("real"))
    photos.symlink_to("real")


def add_what_is_no_image(photos):
    (photos / "train" / "a" / ".hidden.png").write_bytes(b"x")
    (photos / "train" / "a" / "notes.txt").write_bytes(b"x")
    (photos / "README").write_text("mine")


def save(name):
    return lambda photos: picture(8).save(photos / name)


CHANGES = {
    "all images replaced": (replace_all, "train/a/0.png has changed"),
    "two classes swapped": (lambda p: swap(p / "train" / "a", p / "train" / "b"), "train/a/pixel.bmp is now called train/b/pixel.bmp"),
    "two classes of the test set swapped": (lambda p: swap(p / "test" / "a", p / "test" / "b"), "test/a/0.png has changed"),
    "test replaced by train": (make_test_of_train, "test/a/10.png is new (27 more files are missing or new)"),
    "test images replaced by training images": (put_train_into_test, "test/a/0.png has changed"),
    "val and test swapped": (lambda p: swap(p / "val", p / "test"), "val/a/3.png is now called test/a/3.png"),
    "two files renamed": (rename_two, "train/b/3.png is now called train/b/x3.png (2 more files are missing or new)"),
    "another case": (lambda p: (p / "val" / "a" / "0.png").rename(p / "val" / "a" / "0.PNG"), "val/a/0.png is now called val/a/0.PNG"),
    "added to train": (save("train/a/new.png"), "train/a/new.png is new:"),
    "added to val": (save("val/a/new.png"), "val/a/new.png is new:"),
    "added to test": (save("test/a/new.png"), "test/a/new.png is new:"),
    "removed from train": (lambda p: (p / "train" / "c" / "4.png").unlink(), "train/c/4.png is missing:"),
    "removed from val": (lambda p: (p / "val" / "c" / "2.png").unlink(), "val/c/2.png is missing:"),
    "removed from test": (lambda p: (p / "test" / "c" / "2.png").unlink(), "test/c/2.png is missing:"),
    "one pixel changed, with the old time": (change_a_pixel, "train/a/pixel.bmp has changed"),
    "truncated": (truncate, "val/c/1.png has changed"),
    "a byte longer": (append, "train/c/1.png has changed"),
    "moved to another class": (lambda p: (p / "train" / "a" / "0.png").rename(p / "train" / "b" / "from a.png"), "train/a/0.png is now called train/b/from a.png"),
    "moved to another set": (lambda p: (p / "train" / "a" / "0.png").rename(p / "test" / "a" / "from train.png"), "train/a/0.png is now called test/a/from train.png"),
    "class added": (lambda p: paint(p / "train", {"d": 5}), "class 'd' is new"),
    "class removed": (lambda p: [shutil.rmtree(p / name / "c") for name in ("train", "val", "test")], "class 'c' is missing:"),
    "class renamed": (rename_class, "class 'b' is missing and class 'z' is new"),
    "a set removed": (lambda p: shutil.rmtree(p / "val"), "val/a/0.png is missing"),
    "permission lost": (lambda p: (p / "train" / "b" / "2.png").chmod(0), "train/b/2.png cannot be read (Permission denied)"),
    "permission of a test image lost": (lambda p: (p / "test" / "b" / "2.png").chmod(0), "test/b/2.png cannot be read (Permission denied)"),
    "a folder out of reach": (lambda p: (p / "val" / "b").chmod(0), "val/b cannot be listed: Permission denied"),
    "a file became a pipe": (become_a_pipe, "train/a/1.png cannot be read (it is not a regular file"),
    "another order of the listing": (list_in_another_order, None),
    "times touched": (touch, None),
    "files became links to equal copies": (become_links, None),
    "a class became a link": (become_a_linked_class, None),
    "links in circles and to the same files": (link_in_circles, None),
    "moved": (move, None),
    "a link to the folder": (link_root, None),
    "a trailing slash": (lambda p: f"{p}/", None),
    "a relative name": (lambda p: os.path.relpath(p), None),
    "dots in the name": (lambda p: f"{p}/train/../.", None),
    "files that are no images": (add_what_is_no_image, None),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_interruption_and_resume_is_reported_or_harmless(run_cli, home, place, change):
    make, message = CHANGES[change]
    before = {file: file.read_bytes() for file in (place / "run").rglob("*") if file.is_file()}
    other_name = make(place / "photos")
    photos = other_name if isinstance(other_name, str) else place / "photos"
    with like_anybody():
        code, _, err = run_cli("train", home / "tiny.yaml", "--data", photos, "--out", place / "run")
        for folder in place.rglob("b"):
            folder.chmod(0o755)
    if message is None:
        assert (code, err) == (0, "")
        assert not differences(outcome(home / "whole"), outcome(place / "run"))
        return
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert "restore them, or start a new run with another --out" in err
    after = {file: file.read_bytes() for file in (place / "run").rglob("*") if file.is_file()}
    assert after == before  # nothing was trained, and the run can still be resumed with the right images


def test_changes_can_be_undone(run_cli, home, place):
    """Check that a refused command leaves nothing behind that prevents the next one."""
    rename_two(place / "photos")
    command = ("train", home / "tiny.yaml", "--data", place / "photos", "--out", place / "run")
    assert run_cli(*command)[0] == 2
    for name in ("3.png", "7.png"):
        (place / "photos" / "train" / "b" / f"x{name}").rename(place / "photos" / "train" / "b" / name)
    code, _, err = run_cli(*command)
    assert (code, err) == (0, "")
    assert not differences(outcome(home / "whole"), outcome(place / "run"))


def test_settings_chosen_for_images_are_kept_when_these_are_moved(home, tmp_path):
    """Check that the location of the images is no part of the request that `auto` and `--hours` store."""
    config = load_config(home / "tiny.yaml", {"data.source": str(home / "photos")})
    asked = Asked(preset="auto", changes={"data.source": str(home / "photos"), "data.flip": False})
    with Run.start(tmp_path / "run", config.model_copy(update={"asked": asked})):
        pass

    def again(**changes):
        given = {"data.source": "photos/", "data.flip": False, **changes}
        return settings_of("auto", given, tmp_path / "run", Console(quiet=True))[0]

    moved = again()
    assert moved.data.source == "photos/"
    assert moved.data.model_copy(update={"source": config.data.source}) == config.data
    for changes in ({"data.flip": True}, {"data.source": "torch/cifar10"}):
        with pytest.raises(GreedyNASError, match="was started with auto"):
            again(**changes)


def test_a_named_data_set_is_compared_by_its_name(tmp_path):
    with Run.start(tmp_path, load_config("fashion", {"data.source": "torch/cifar10"})):
        pass
    for source in ("torch/cifar100", "fashion", "photos"):
        with pytest.raises(GreedyNASError, match=f"data.source is 'torch/cifar10' there, '{source}' here"):
            Run.start(tmp_path, load_config("fashion", {"data.source": source}))
    with Run.start(tmp_path, load_config("fashion", {"data.source": "torch/cifar10", "data.root": "elsewhere"})):
        pass


def test_machines_with_other_images_are_refused(home, tmp_path):
    """Check two ranks, each the first one of its machine, with the same names of images and different contents."""
    shutil.copytree(home / "photos", tmp_path / "photos")
    change_a_pixel(tmp_path / "photos")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    command = ["train", home / "tiny.yaml", "--data", "photos", "--out", tmp_path / "run"]
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", "greedynas", *command],
            cwd=place,
            env={**os.environ, **TINY, **common, "PYTHONPATH": str(ROOT), "RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, place in enumerate((home, tmp_path))
    ]
    codes, _, said = finish(machines)
    assert codes == [2, 2], said
    assert "the machines of this run do not have the same images" in "".join(said)
    assert "Traceback" not in "".join(said)
    assert not list((tmp_path / "run").glob("supernet/step-*"))


# The content of the manifest, and the files that are read for it


def entries(folder):
    head, *files = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return head, {file["name"]: file for file in files}


def test_the_manifest_names_every_image_with_its_set(home):
    head, files = entries(home / "interrupted")
    assert head["classes"] == ["a", "b", "c"]
    assert head["whole"] is True
    assert set(files) == {
        str(file.relative_to(home / "photos")) for file in (home / "photos").rglob("*") if file.is_file()
    }
    assert {(name.split("/")[0], file["set"]) for name, file in files.items()} == {
        ("train", "train"), ("val", "val"), ("test", "test")
    }  # fmt: skip
    assert len({file["hash"] for file in files.values()}) == len(files)
    assert files["train/a/0.png"]["bytes"] == (home / "photos" / "train" / "a" / "0.png").stat().st_size


class Opened:
    """A counter of the files below a folder that are opened, by Python's audit events."""

    current = None

    def __init__(self, folder):
        self.folder, self.names = str(folder), []
        if Opened.current is None:
            sys.addaudithook(lambda event, arguments: Opened.current.hear(event, arguments))
        Opened.current = self

    def hear(self, event, arguments):
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            name = os.fsdecode(arguments[0])
            if name.startswith(self.folder):
                self.names.append(os.path.relpath(name, self.folder))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        Opened.current = self.__class__.__new__(Opened)
        Opened.current.folder, Opened.current.names = "\0", []


def begin(photos, folder, **settings):
    """Start a run and return its settings for opening the same images again."""
    chosen = DataSettings(source=str(photos), **{"workers": 0, "check_duplicates": False, **settings})
    how = {"image_size": 8, "image_channels": 3, "seed": 0, "device": CPU}
    with Run.start(folder, load_config("fashion")) as run:
        run.check_data(open_data(chosen, **how))
    return chosen, {**how, "folder": folder}


def test_files_are_read_once_and_then_only_if_they_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "FRESH_NS", 0)  # as if the images were seconds old
    for name, count in (("train", 8), ("test", 3)):
        paint(tmp_path / "photos" / name, {"a": count, "b": count}, first=count)
    chosen, how = begin(tmp_path / "photos", tmp_path / "run")

    def read_again():
        with Opened(tmp_path / "photos" / "test") as test, Run.open(tmp_path / "run") as run:
            run.check_data(open_data(chosen, **how))
        return test.names

    assert read_again() == []  # test images are not decoded, and show no sign of a change
    os.utime(tmp_path / "photos" / "test" / "a" / "1.png")
    assert read_again() == ["a/1.png"]
    assert read_again() == []  # its new time is stored
    shutil.copytree(tmp_path / "photos", tmp_path / "copy")
    shutil.rmtree(tmp_path / "photos")
    (tmp_path / "copy").rename(tmp_path / "photos")
    assert sorted(read_again()) == sorted(f"{name}/{i}.png" for name in "ab" for i in range(3))
    assert read_again() == []
    change = tmp_path / "photos" / "test" / "b" / "2.png"
    status, data = change.stat(), change.read_bytes()
    change.write_bytes(data[:-1] + b"\1")
    os.utime(change, ns=(status.st_atime_ns, status.st_mtime_ns))  # with the same time and size as before
    with pytest.raises(GreedyNASError, match=r"test/b/2\.png has changed"):
        read_again()


def test_a_file_that_has_just_changed_is_not_trusted(tmp_path):
    """Check a file that may change again within the resolution of the clock."""
    paint(tmp_path / "photos", {"a": 10, "b": 10})
    begin(tmp_path / "photos", tmp_path / "run")
    assert {file["changed_ns"] for file in entries(tmp_path / "run")[1].values()} == {0}


def test_only_the_ends_of_very_large_data_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "WHOLE_BYTES", 100_000)
    paint(tmp_path / "photos", {"a": 10, "b": 10})
    large = tmp_path / "photos" / "a" / "large.bmp"
    Image.fromarray(np.zeros((200, 200, 3), np.uint8)).save(large)
    chosen, how = begin(tmp_path / "photos", tmp_path / "run", test_images=2, val_images=2)
    assert entries(tmp_path / "run")[0]["whole"] is False
    size = large.stat().st_size
    for place, noticed in ((-1, True), (100, True), (size // 2, False), (END_BYTES + 10, False)):
        data = bytearray(large.read_bytes())
        data[place] ^= 1
        large.write_bytes(data)
        if noticed:
            with pytest.raises(GreedyNASError, match=r"a/large\.bmp has changed"):
                open_data(chosen, **how)
        else:
            open_data(chosen, **how)
        data[place] ^= 1
        large.write_bytes(data)


def test_the_split_of_a_run_is_kept(tmp_path):
    """Check that the split is not made again from the order of names."""
    paint(tmp_path / "photos", {"a": 10, "b": 10})
    chosen, how = begin(tmp_path / "photos", tmp_path / "run", val_images=4, test_images=4)
    fresh = open_data(chosen, **how)
    files = entries(tmp_path / "run")[1]
    sets = {
        role: sorted(name for name, file in files.items() if file["set"] == role) for role in ("train", "val", "test")
    }
    assert [len(names) for names in sets.values()] == [12, 4, 4]
    swapped = {sets["train"][0]: "test", sets["test"][0]: "train"}
    manifest = read_manifest(tmp_path / "run")
    roles = [swapped.get(name, role) for name, role in zip(manifest.names, manifest.roles, strict=True)]
    write_manifest(tmp_path / "run", replace(manifest, roles=tuple(roles)))
    kept = open_data(chosen, **how)
    assert not torch.equal(kept.test().eval_batch()[0], fresh.test().eval_batch()[0])
    expected = [tmp_path / "photos" / name for name in sorted({*sets["test"], sets["train"][0]} - {sets["test"][0]})]
    assert [kept._splits.train.path(row) for row in kept._rows["test"]] == expected
    with Run.open(tmp_path / "run") as run:
        run.check_data(kept)
        with pytest.raises(GreedyNASError, match="they are split differently"):
            run.check_data(fresh)


def test_images_that_are_not_files_are_compared(tmp_path, monkeypatch):
    chosen = DataSettings(source="fashion", val_images=1000, workers=0)
    how = {"image_size": 28, "image_channels": 1, "seed": 0, "device": CPU}
    data = open_data(chosen, **how)
    with Run.start(tmp_path, load_config("fashion")) as run:
        run.check_data(data)
    kept = read_manifest(tmp_path)
    assert len(kept.held_out["val"]) == 1000
    assert open_data(chosen, **how, folder=tmp_path).identity() == data.identity()
    data._splits.test.pixels[7, 3, 3] ^= 1
    data._splits.test.__dict__.pop("all_digest")
    data.__dict__.pop("manifest")
    with Run.open(tmp_path) as run, pytest.raises(GreedyNASError, match="the test images have changed"):
        run.check_data(data)


@pytest.mark.parametrize("changed", ["train", "val"])
def test_shards_are_compared_before_a_test_set_is_read(tmp_path, changed):
    pytest.importorskip("webdataset")
    for name, samples in (("train", range(20)), ("val", range(35, 45))):
        (tmp_path / "shards").mkdir(exist_ok=True)
        write_shard(tmp_path / "shards" / f"x-{name}-0.tar", samples)
    chosen, how = begin("wds/x", tmp_path / "run", root=str(tmp_path / "shards"))
    data = open_data(chosen, **how)
    before = data.identity()
    assert len(data.test()) == 10
    data.__dict__.pop("manifest")
    assert data.identity() == before  # the same after the test set was read
    (tmp_path / "shards").rename(tmp_path / "moved")
    chosen = chosen.model_copy(update={"root": str(tmp_path / "moved")})
    assert open_data(chosen, **how).identity() == before
    write_shard(tmp_path / "moved" / f"x-{changed}-0.tar", range(50, 70))
    with pytest.raises(GreedyNASError, match=f"x-{changed}-0.tar has changed"):
        open_data(chosen, **how)


def test_tables_of_hugging_face_are_compared(tmp_path):
    pytest.importorskip("datasets")
    for name, count in (("train", 10), ("test", 3)):
        paint(tmp_path / "set" / name, {"a": count, "b": count}, first=count)
    chosen, how = begin(f"hfds/{tmp_path}/set", tmp_path / "run", root=str(tmp_path / "cache"))
    assert open_data(chosen, **how).identity() == open_data(chosen, **{**how, "folder": None}).identity()
    picture(99).save(tmp_path / "set" / "test" / "a" / "1.png")
    chosen = chosen.model_copy(update={"root": str(tmp_path / "another cache")})
    with pytest.raises(GreedyNASError, match="the test images have changed"):
        open_data(chosen, **how)


def test_a_run_of_the_previous_version_is_resumed_and_gets_a_manifest(tmp_path):
    paint(tmp_path / "photos", {"a": 10, "b": 10})
    chosen, how = begin(tmp_path / "photos", tmp_path / "run")
    data = open_data(chosen, **how)
    (tmp_path / "run" / FILE).unlink()
    old = {"schema_version": 1, **data.labels_identity()}
    (tmp_path / "run" / "data.json").write_text(json.dumps({**old, "train": 1}))
    with Run.open(tmp_path / "run") as run, pytest.raises(GreedyNASError, match="train is 1 there, 14 here"):
        run.check_data(data)
    assert read_manifest(tmp_path / "run") is None
    (tmp_path / "run" / "data.json").write_text(json.dumps(old))
    with Run.open(tmp_path / "run") as run:
        run.check_data(data)
    assert read_manifest(tmp_path / "run").digest() == data.identity()["digest"]


def test_a_lost_manifest_is_reported(run_cli, home, place):
    (place / "run" / FILE).unlink()
    code, _, err = run_cli("train", home / "tiny.yaml", "--data", place / "photos", "--out", place / "run")
    assert code == 0
    assert err.startswith(f"warning: {place / 'run' / FILE} is missing")
    assert err.count("\n") == 1
    assert read_manifest(place / "run") is not None


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", '{"schema_version": 3}', '{"schema_version": 2}', "[" * 5000,
     '{"schema_version": 2, "classes": ["a"], "whole": true, "arrays": {}, "held_out": {}, "skipped": []}\n{"set": "none"}',
     '{"schema_version": 2, "classes": ["a"], "whole": true, "arrays": {}, "held_out": {"val": [-1]}, "skipped": []}',
     '{"schema_version": 2, "classes": ["a"], "whole": true, "arrays": {}, "held_out": {}, "skipped": []}\n'
     '{"set": "train", "name": "a/0.png", "bytes": 1e9, "changed_ns": 0, "hash": ""}'],
)  # fmt: skip
def test_a_damaged_manifest_is_one_line(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(GreedyNASError, match=r"data\.jsonl is damaged .*; start a new run with another --out") as error:
        read_manifest(tmp_path)
    assert "\n" not in str(error.value)


def test_a_manifest_that_does_not_match_its_digest_is_damaged(tmp_path):
    """Check that a flipped bit in the manifest is not reported as a change of the images."""
    paint(tmp_path / "photos", {"a": 10, "b": 10})
    begin(tmp_path / "photos", tmp_path / "run")
    file = tmp_path / "run" / FILE
    text = file.read_text()
    for old, new in (('"set": "val"', '"set": "train"'), ("a/3.png", "a/8.pnh"), ('"hash": "', '"hash": "0')):
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(GreedyNASError, match=r"data\.jsonl is damaged .*its content does not match its digest"):
            read_manifest(tmp_path / "run")


def test_different_sets_of_decodable_images_are_noticed(tmp_path):
    """Check images that another version of Pillow, or other permissions, would skip."""
    paint(tmp_path / "photos", {"a": 12, "b": 12})
    (tmp_path / "photos" / "a" / "3.png").write_bytes(b"no image")
    chosen, how = begin(tmp_path / "photos", tmp_path / "run")
    assert entries(tmp_path / "run")[0]["skipped"] in ([], ["a/3.png"])
    data = open_data(chosen, **how)
    data._pool.rows = np.delete(data._pool.rows, 5)
    data.__dict__.pop("manifest", None)
    with Run.open(tmp_path / "run") as run, pytest.raises(GreedyNASError, match=r"\d\.png cannot be decoded here"):
        run.check_data(data)


def test_names_that_are_not_utf8_are_stored(tmp_path):
    paint(tmp_path / "photos", {"a": 10, "b": 10})
    picture(1).save(os.fsdecode(os.fsencode(tmp_path / "photos" / "a") + b"/caf\xe9.png"))
    chosen, how = begin(tmp_path / "photos", tmp_path / "run")
    data = open_data(chosen, **how)
    assert len(data.manifest.names) == 21
    os.unlink(os.fsencode(tmp_path / "photos" / "a") + b"/caf\xe9.png")  # noqa: PTH108
    with pytest.raises(GreedyNASError, match=r"a/caf\\xe9\.png is missing"):
        open_data(chosen, **how)


def test_the_same_images_have_the_same_identity_everywhere(tmp_path):
    first = opened(paint(tmp_path / "one", {"a": 9, "b": 9}), 8, 3)
    second = opened(f"{paint(tmp_path / 'two', {'a': 9, 'b': 9})}/", 8, 3)
    assert first.identity() == second.identity()
    assert first.identity() != opened(tmp_path / "one", 8, 3, seed=1).identity()
    assert first.identity() != opened(paint(tmp_path / "three", {"a": 9, "b": 9}, first=1), 8, 3).identity()
