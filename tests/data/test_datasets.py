import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greedynas.data import datasets, loader
from greedynas.data.class_weights import macro_accuracy
from greedynas.data.datasets import open_data
from greedynas.data.settings import DataSettings
from greedynas.data.sources import Files
from greedynas.data.specs import FASHION, read_splits
from greedynas.data.splits import hold_out
from greedynas.data.transforms import normalisation
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.parallel import ranks
from tests.helpers.pictures import CPU, opened, paint, picture, pixels, spoil

# The embedded sample


def test_the_embedded_sample():
    assert FASHION.stat().st_size < 5_000_000
    assert "2017, Zalando SE" in FASHION.with_name("fashion.LICENSE.txt").read_text()
    data = opened(val_images=2000)
    assert [len(data.train), len(data.val), len(data.test()), len(data.train_and_val())] == [6000, 2000, 2000, 8000]
    assert data.class_names[0] == "T-shirt/top"
    assert data.class_names[-1] == "Ankle boot"
    for images, count in ((data.train, 600), (data.val, 200), (data.test(), 200)):
        assert images.in_memory
        assert torch.bincount(images.labels).tolist() == [count] * 10
    with np.load(FASHION, allow_pickle=False) as arrays:
        images, labels = data.test().eval_batch()
        assert (pixels(images, 1)[..., 0].round().numpy() == arrays["test_images"]).all()
        assert (labels.numpy() == arrays["test_labels"]).all()
        whole, _ = data.train_and_val().eval_batch()
        assert (pixels(whole, 1)[..., 0].round().numpy() == arrays["train_images"]).all()
    assert any("no test image is an exact copy" in note for note in data.notes)


def test_normalisation_is_timms():
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    assert normalisation(3) == (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    assert normalisation(1) == (pytest.approx((0.449,)), pytest.approx((0.226,)))
    with pytest.raises(GreedyNASError, match=r"1 .* or 3 .* channels, not 4"):
        normalisation(4)


# Splits


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ({"train": 10, "test": 4}, (18, 2, 8)),
        ({"training": 10, "valid": 4}, (18, 2, 8)),  # a single other set is the test set
        ({"Train": 10, "val": 3, "test": 4}, (20, 6, 8)),
        ({"": 10}, (14, 2, 4)),
    ],
)
def test_all_layouts_of_a_folder_are_read(tmp_path, folders, expected):
    for i, (name, count) in enumerate(folders.items()):
        paint(tmp_path / name, {"cat": count, "dog": count}, first=i)
    data = opened(tmp_path, 8, 3)
    assert (len(data.train), len(data.val), len(data.test())) == expected
    assert data.class_names == ["cat", "dog"]
    held_out = not {"val", "test"} < set(folders)
    assert len(data.train_and_val()) == len(data.train) + held_out * len(data.val)
    seen = [
        picture.numpy().tobytes()
        for images in (data.train, data.val, data.test())
        for picture in images.eval_batch()[0]
    ]
    assert len(set(seen)) == len(seen) == sum(expected)


def test_classes_may_be_called_train_and_have_numbers_and_subfolders(tmp_path):
    paint(tmp_path, {"train": 8, "bus 10/front": 4, "bus 10/back": 4, "bus 9": 8, ".hidden": 3})
    picture(0).save(tmp_path / "stray.png")
    data = opened(tmp_path, 8, 3, val_images=3)
    assert data.class_names == ["bus 9", "bus 10", "train"]
    assert len(data.train) + len(data.val) + len(data.test()) == 24
    assert any("stray.png" in note for note in data.notes)


def test_splits_depend_only_on_the_seed(tmp_path):
    paint(tmp_path, {"a": 20, "b": 30})

    def test_images(seed, **settings):
        return opened(tmp_path, 8, 3, seed=seed, **settings).test().eval_batch()[0]

    assert torch.equal(test_images(1), test_images(1, val_images=20))
    assert not torch.equal(test_images(1), test_images(2))


@pytest.mark.parametrize("own_val", [False, True])
def test_another_seed_needs_no_decoding(tmp_path, own_val):
    for split, count in (("train", 12), ("test", 3), *([("val", 4)] if own_val else [])):
        paint(tmp_path / split, {"a": count, "b": count}, first=count)
    settings = DataSettings(source=str(tmp_path), workers=0, val_images=6, class_weights="balanced")
    fresh, kept = (open_data(settings, image_size=8, image_channels=3, seed=seed, device=CPU) for seed in (7, 3))
    kept.test()
    anew = kept.split_anew(settings, 7)
    assert anew.identity() == fresh.identity()
    assert anew.notes[0] == fresh.notes[0]
    for ours, theirs in ((anew.train, fresh.train), (anew.val, fresh.val), (anew.test(), fresh.test())):
        for mine, other in zip(ours.train_batches(2, 4), theirs.train_batches(2, 4), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
        assert torch.equal(ours.eval_batch()[0], theirs.eval_batch()[0])
    assert torch.equal(anew.class_weights, fresh.class_weights)


def test_another_seed_holds_out_another_test_set(tmp_path):
    paint(tmp_path, {"a": 12, "b": 12})
    settings = DataSettings(source=str(tmp_path), workers=0, val_images=6)
    assert opened(tmp_path, 8, 3, seed=3, val_images=6).split_anew(settings, 7) is None


@given(st.lists(st.integers(3, 60), min_size=2, max_size=8), st.data(), st.integers(0, 10))
def test_hold_out_is_stratified(counts, data, seed):
    counts = np.array(counts)
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    names = [str(i) for i in range(len(counts))]
    test = data.draw(st.integers(len(counts), counts.sum() - 2 * len(counts)))
    val = data.draw(st.integers(len(counts), counts.sum() - test - len(counts)))
    rows = hold_out(labels, names, {"test": test, "val": val}, np.random.default_rng(seed))
    assert [len(rows[part]) for part in ("test", "val")] == [test, val]
    assert sorted(np.concatenate(list(rows.values()))) == list(range(len(labels)))
    for part in rows.values():
        assert (np.diff(part) > 0).all()
        assert (np.bincount(labels[part], minlength=len(counts)) >= 1).all()
    quota = test * counts / counts.sum()
    if (np.floor(quota) >= 1).all() and (np.ceil(quota) <= counts - 2).all():
        assert (np.abs(np.bincount(labels[rows["test"]]) - quota) < 1).all()


def test_fractions_are_of_all_images():
    labels = np.repeat([0, 1], [60, 40])
    rows = hold_out(labels, ["a", "b"], {"test": 0.2, "val": 0.1}, np.random.default_rng(0))
    assert {part: np.bincount(labels[own]).tolist() for part, own in rows.items()} == {
        "test": [12, 8],
        "val": [6, 4],
        "train": [42, 28],
    }


@pytest.mark.parametrize(
    ("counts", "wanted", "message"),
    [
        ((5, 1), {"val": 2}, "class 'b' has too few images .1.: at least 2"),
        ((5, 2), {"test": 2, "val": 2}, "at least 3 are needed, one each for test, val and train"),
        ((50, 50), {"val": 1}, "val_images = 1 .* set it to at least 2"),
        ((50, 50), {"val": 0.01}, "val_images = 0.01 of 100 images is 1, fewer than the 2 classes"),
        ((50, 50), {"val": 99}, "needs 99 images, but of 100 at most 98"),
        ((50, 50), {"test": 60, "val": 39}, "val_images = 39 needs 39 images, but of 100 at most 38"),
    ],
)
def test_impossible_splits_are_refused(counts, wanted, message):
    with pytest.raises(GreedyNASError, match=message):
        hold_out(np.repeat([0, 1], counts), ["a", "b"], wanted, np.random.default_rng(0))


# Balanced draws, weights, accuracy


@given(st.lists(st.integers(1, 12), min_size=2, max_size=10), st.data(), st.integers(0, 2**32))
def test_draws_are_balanced(counts, data, seed):
    images = fake_set(np.repeat(np.arange(len(counts)), counts))
    n = data.draw(st.integers(0, sum(counts)))
    drawn = images.balanced(n, np.random.default_rng(seed))
    assert len(drawn) == len(set(drawn.tolist())) == n
    taken = np.bincount(images.labels.numpy()[drawn], minlength=len(counts))
    short = taken < counts
    assert (taken <= counts).all()
    if short.any():  # classes with more images contribute equally, and no less than any other
        assert taken[short].max() - taken[short].min() <= 1
        assert taken.max() <= taken[short].min() + 1
    assert (drawn == images.balanced(n, np.random.default_rng(seed))).all()


def fake_set(labels):
    """Return a set of images with only labels."""
    source = Files([str(i) for i in range(labels.max() + 1)], labels, [""] * len(labels))
    rows = np.arange(len(labels))
    return loader.Shelf(source, rows, None, None, CPU, 0, False).select(rows)


def test_balanced_draws_reach_every_image():
    images = fake_set(np.repeat([0, 1, 2], [30, 10, 20]))
    rng = np.random.default_rng(0)
    drawn = np.concatenate([images.balanced(10, rng) for _ in range(300)])
    counts = np.bincount(drawn, minlength=60)
    assert counts.min() > 0
    by_class = np.bincount(images.labels.numpy()[drawn])
    assert by_class.tolist() == pytest.approx([1000] * 3, abs=60)  # the remainder goes to random classes
    with pytest.raises(GreedyNASError, match="cannot draw 61 different images: there are only 60"):
        images.balanced(61, rng)


def test_class_weights(tmp_path):
    paint(tmp_path / "train", {"a": 11, "b": 31})
    paint(tmp_path / "test", {"a": 2, "b": 2}, first=1)
    assert opened(tmp_path, 8, 3).class_weights is None
    weights = opened(tmp_path, 8, 3, val_images=2, class_weights="balanced").class_weights
    torch.testing.assert_close(weights, torch.tensor([2.0, 2 / 3]))


def test_macro_accuracy_averages_over_the_classes_present():
    labels = torch.tensor([0, 0, 0, 0, 2, 2])
    correct = torch.tensor([True, True, True, False, False, True])
    assert macro_accuracy(correct, labels, 4) == pytest.approx((0.75 + 0.5) / 2)


# Copies


def test_copies_between_train_and_test_are_counted(tmp_path):
    paint(tmp_path / "train", {"a": 10, "b": 10})
    paint(tmp_path / "test", {"a": 5, "b": 5}, first=1)
    for i in range(3):
        (tmp_path / "test" / "a" / f"copy{i}.png").write_bytes((tmp_path / "train" / "b" / f"{i}.png").read_bytes())
    notes = opened(tmp_path, 8, 3).notes
    assert any(note.startswith("3 of 13 test images are exact copies") and "copy0.png" in note for note in notes)
    assert opened(tmp_path, 8, 3, check_duplicates=False).notes == notes[:-1]


def test_copies_are_found_in_held_out_images_and_in_arrays(tmp_path):
    (tmp_path / "a").mkdir()
    paint(tmp_path, {"a": 1, "b": 9})
    for i in range(1, 10):
        (tmp_path / "a" / f"{i}.png").write_bytes((tmp_path / "a" / "0.png").read_bytes())
    assert any(note.startswith("2 of 4 test images are exact copies") for note in opened(tmp_path, 8, 3).notes)


# Settings, separate sets, broken files


def test_the_default_augmentation_is_that_of_cifar_and_settings_are_unchanged():
    settings = DataSettings()
    assert (settings.augment, settings.pad, settings.flip) == ("pad_crop", 4, True)
    with pytest.raises(ValueError, match="frozen"):
        settings.pad = 3


@pytest.mark.parametrize(("size", "stored"), [(28, 28), (64, 64), (65, 74), (224, 256)])
def test_images_of_more_than_64_pixels_are_cropped_for_evaluation(size, stored):
    assert datasets._view(DataSettings(), size, 3, 0).stored == stored


@pytest.mark.parametrize(
    ("counts", "size", "expected"),
    [((15, 38, 47), 10, [1, 4, 5]), ((4, 4, 4, 28), 4, [1, 1, 1, 1]), ((2, 2, 46), 10, [1, 1, 8])],
)
def test_parts_are_in_proportion_by_largest_remainders(counts, size, expected):
    labels = np.repeat(np.arange(len(counts)), counts)
    rows = hold_out(labels, [str(i) for i in range(len(counts))], {"val": size}, np.random.default_rng(0))
    assert np.bincount(labels[rows["val"]]).tolist() == expected


def test_a_class_whose_validation_images_are_all_broken_gets_one_of_the_training_images(tmp_path):
    paint(tmp_path / "train", {"a": 12, "b": 12})
    paint(tmp_path / "test", {"a": 2, "b": 2}, first=1)
    before = opened(tmp_path, 8, 3, val_images=6)
    source = before._pool.source
    for row in before.val.rows[before.val.labels.numpy() == 1]:
        spoil(source.path(row))
    data = opened(tmp_path, 8, 3, val_images=6)
    assert torch.bincount(before.val.labels).tolist() == [3, 3]
    assert torch.bincount(data.val.labels).tolist() == [3, 1]
    assert torch.bincount(data.train.labels).tolist() == [9, 8]
    moved = set(data.val.rows) - set(before.val.rows)
    assert moved == {min(row for row in before.train.rows if source.labels[row] == 1)}
    assert not set(data.train.rows) & set(data.val.rows)


def test_the_only_readable_image_of_a_class_stays_in_its_set(tmp_path):
    paint(tmp_path / "train", {"a": 6, "b": 6})
    paint(tmp_path / "test", {"a": 2, "b": 2}, first=1)
    before = opened(tmp_path, 8, 3, val_images=2)
    for row in before.train.rows[before.train.labels.numpy() == 1]:
        spoil(before._pool.source.path(row))
    with pytest.raises(GreedyNASError, match="no readable image of class 'b' is left in the training set"):
        opened(tmp_path, 8, 3, val_images=2)


def test_a_separate_validation_set_may_lack_a_class_and_its_broken_files_are_stored(tmp_path):
    paint(tmp_path / "train", {"a": 6, "b": 6})
    paint(tmp_path / "val", {"b": 4}, first=1)
    paint(tmp_path / "test", {"a": 2, "b": 2}, first=2)
    spoil(tmp_path / "val" / "b" / "1.png")
    data = opened(tmp_path, 8, 3)
    assert data.val.labels.tolist() == [1, 1, 1]
    (skipped,) = data.manifest.skipped
    assert skipped.endswith("b/1.png")


def test_a_test_set_without_a_readable_image_is_refused(tmp_path):
    paint(tmp_path / "train", {"a": 6, "b": 6})
    for file in sorted(paint(tmp_path / "test", {"a": 2, "b": 2}, first=1).glob("*/*.png")):
        spoil(file)
    with pytest.raises(GreedyNASError, match="no readable image is left in the test set"):
        opened(tmp_path, 8, 3, val_images=2).test()


# Notes


def test_every_note_is_shown_once(tmp_path):
    paint(tmp_path / "train", {"a": 9, "b": 9})
    paint(tmp_path / "test", {"a": 2, "b": 2}, first=1)
    spoil(tmp_path / "test" / "a" / "0.png")
    settings = DataSettings(source=str(tmp_path), workers=0, val_images=4)
    fresh, data = (opened(tmp_path, 8, 3, seed=seed, val_images=4) for seed in (7, 3))
    assert data.split_anew(settings, 7).notes == fresh.notes
    data.test()
    assert len(set(data.notes)) == len(data.notes) > len(fresh.notes)


def test_a_note_says_that_copies_were_not_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "find_copies", lambda *_: None)
    data = opened(paint(tmp_path, {"a": 9, "b": 9}), 8, 3)
    assert data.notes[-1].startswith("train and test were not compared for copies")
    data.test()
    assert "copies" not in data.caveats() or data.caveats()["copies"] is None


def test_a_test_set_without_random_access_is_read_at_the_end(tmp_path, monkeypatch):
    paint(tmp_path / "train", {"a": 9, "b": 9, "c": 9})
    paint(tmp_path / "test", {"c": 3}, first=1)
    (tmp_path / "test" / "c" / "copy.png").write_bytes((tmp_path / "train" / "a" / "0.png").read_bytes())
    read = []

    def late(*arguments):
        splits = read_splits(*arguments)
        test, splits.test = splits.test, None
        test.notes.append("a note of the test set")
        splits.late_test = lambda: read.append(1) or test
        return splits

    monkeypatch.setattr(datasets, "read_splits", late)
    data = opened(tmp_path, 8, 3, val_images=6)
    assert (read, data.test_count) == ([], 0)
    assert "test read at the end" in data.notes[0]
    assert data.test().labels.tolist() == [2] * 4
    assert data.test() is data.test()
    assert (read, data.test_count) == ([1], 4)
    assert "a note of the test set" in data.notes
    assert any(note.startswith("1 of 4 test images are exact copies") for note in data.notes)
    assert data.caveats()["copies"] == 1


# Several ranks


def test_ranks_download_once_and_compare_names_and_classes(tmp_path, monkeypatch):
    paint(tmp_path / "one", {"a": 6, "b": 6})
    paint(tmp_path / "other", {"a": 6, "b": 5})
    read, compared = [], []
    monkeypatch.setattr(datasets, "read_splits", lambda *given: read.append(given[:3]) or read_splits(*given))
    monkeypatch.setattr(ranks, "refuse_disagreement", lambda *given: compared.append(given))
    monkeypatch.setattr(ranks, "size", lambda: 2)
    for folder in ("one", "one", "other"):
        opened(tmp_path / folder, 8, 3, val_images=2, test_images=2, download=True, root="here")
    assert read[:2] == [(str(tmp_path / "one"), "here", True)] * 2  # read first by only one rank
    assert [what for what, _ in compared] == ["images"] * 3
    assert compared[0] == compared[1] != compared[2]


# Data sets that are handed over


def handed_over(image, label=lambda i: i % 3, count=30):
    items = [(image, label(i)) for i in range(count)]
    return open_data(items, image_size=8, settings=DataSettings(workers=0, val_images=6, test_images=6), device="cpu")


SQUARE = np.random.default_rng(0).integers(1, 256, (8, 8, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "image", [SQUARE, SQUARE.astype(np.int64), torch.tensor(SQUARE.transpose(2, 0, 1)), SQUARE / 255]
)
def test_every_form_of_an_image_is_the_same_image(image):
    images, _ = handed_over(image).train.eval_batch([0])
    assert (pixels(images, 3)[0].round().numpy() == SQUARE).all()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (SQUARE.astype(np.uint16) * 256, "got uint16 from 256 to"),
        (SQUARE.astype(np.int64) - 9, "got int64 from -8 to"),
        (SQUARE.astype(np.float32), "got float32 from 1"),
        (np.full((8, 8), np.nan), "got float64 from nan"),
        (SQUARE > 100, "got bool"),
        (SQUARE.transpose(2, 0, 1), r"got ndarray of shape \(3, 8, 8\)"),
        (SQUARE[:0], r"got ndarray of shape \(0, 8, 3\)"),
        (SQUARE[None], r"got ndarray of shape \(1, 8, 8, 3\)"),
        ("0.png", "got str"),
    ],
)
def test_images_that_do_not_fit_into_bytes_are_refused(image, message):
    with pytest.raises(GreedyNASError, match=f"^train of the data set: images of a data set are PIL images.*{message}"):
        handed_over(image)


@pytest.mark.parametrize("label", [lambda i: i % 3 + 0.5, lambda i: torch.tensor(i % 3 + 0.25)])
def test_labels_are_not_rounded(label):
    with pytest.raises(GreedyNASError, match=r"whole numbers as labels: got the label 0\.[25]"):
        handed_over(SQUARE, label)


def test_labels_of_a_data_set_are_not_rounded():
    class Half(list):
        targets = np.arange(30) % 3 + 0.5

    with pytest.raises(GreedyNASError, match=r"got the label 0\.5"):
        open_data(Half([(SQUARE, 0)] * 30), image_size=8, device="cpu")


def test_whole_numbers_may_be_floats():
    assert handed_over(SQUARE, lambda i: float(i % 3)).class_names == ["0", "1", "2"]


def test_other_keys_of_a_mapping_are_named():
    with pytest.raises(GreedyNASError, match=r"got train, tset$"):
        open_data({"train": [(SQUARE, 0), (SQUARE, 1)], "tset": []}, image_size=8, device="cpu")
