"""The check for test images that are copies of training or validation images."""

import pytest

from tests.helpers.pictures import opened, paint


@pytest.fixture
def folder(tmp_path):
    """Create different pictures in train, val and test."""
    for first, (split, count) in enumerate({"train": 6, "val": 3, "test": 4}.items()):
        paint(tmp_path / split, {"a": count, "b": count}, first=first)
    return tmp_path


def copied(folder, source, target):
    (folder / target).write_bytes((folder / source).read_bytes())


def about_copies(folder, **settings):
    notes = [note for note in opened(folder, 8, 3, **settings).notes if "exact cop" in note]
    assert len(notes) == 1
    return notes[0]


def test_no_copies_are_found_among_different_pictures(folder):
    assert about_copies(folder) == "no test image is an exact copy of a training image"


@pytest.mark.parametrize("split", ["train", "val"])
def test_copies_of_training_and_validation_images_are_found(folder, split):
    copied(folder, f"{split}/b/1.png", "test/a/copy.png")
    copied(folder, f"{split}/a/2.png", "test/b/0.png")
    note = about_copies(folder)
    assert note.startswith("2 of 9 test images are exact copies of training images, the first: ")
    assert "copy.png of" in note
    assert note.endswith(f"{split}/b/1.png")


def test_copies_within_one_set_do_not_count(folder):
    copied(folder, "train/a/0.png", "val/a/9.png")
    copied(folder, "test/a/0.png", "test/b/9.png")
    assert about_copies(folder) == "no test image is an exact copy of a training image"


def test_copies_of_images_held_out_for_validation_are_found(tmp_path):
    """Check a set where every image of train has a copy in test, and some are held out for validation."""
    paint(tmp_path / "train", {"a": 8, "b": 8})
    paint(tmp_path / "test", {"a": 8, "b": 8})
    assert about_copies(tmp_path, val_images=6).startswith("16 of 16 test images are exact copies")
