import gzip
import pickle
import runpy
import struct
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from greedynas.data.settings import DataSettings
from greedynas.data.specs import FASHION, _from_torchvision
from greedynas.data.transforms import square
from greedynas.runtime.errors import GreedyNASError
from tests.helpers.pictures import opened, paint, picture, pixels, same_batches
from tests.helpers.shards import write_shard

# Data sets by name


def idx(array):
    return struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_a_torchvision_set_is_read_by_name(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 60), ("t10k", 20)):
        arrays[split] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), np.arange(n, dtype=np.uint8) % 10
    arrays["t10k"][0][0] = arrays["train"][0][0]
    for split, (images, labels) in arrays.items():
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels))
    data = opened("torch/fashion_mnist", root=str(tmp_path), val_images=10)
    assert data.class_names[9] == "Ankle boot"
    assert (pixels(data.train_and_val().eval_batch()[0], 1)[..., 0].round().numpy() == arrays["train"][0]).all()
    assert (pixels(data.test().eval_batch()[0], 1)[..., 0].round().numpy() == arrays["t10k"][0]).all()
    assert any(note.startswith("1 of 20 test images") for note in data.notes)
    colour = opened("torch/fashion_mnist", 32, 3, root=str(tmp_path), val_images=10)  # resized, grey to RGB
    assert colour.train.eval_batch([0])[0].shape == (1, 3, 32, 32)
    streaming = opened("torch/fashion_mnist", 32, 3, root=str(tmp_path), val_images=10, memory_gb=0)
    assert same_batches(colour.train.train_batches(0, 8), streaming.train.train_batches(0, 8))


def test_a_colour_set_of_torchvision(tmp_path):
    """Read files in CIFAR-10's format without its name, for which torchvision checks the checksums of the originals."""
    from torchvision.datasets import CIFAR10

    class Unchecked(CIFAR10):
        train_list = (("data_batch_1", None),)
        test_list = (("test_batch", None),)
        meta = {"filename": "batches.meta", "key": "label_names", "md5": None}  # noqa: RUF012

    images = np.random.default_rng(0).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, content in (
        ("data_batch_1", {"data": images.reshape(20, -1), "labels": [i % 2 for i in range(20)]}),
        ("test_batch", {"data": images[:4].reshape(4, -1), "labels": [0, 1, 0, 1]}),
        ("batches.meta", {"label_names": ["airplane", "automobile"]}),
    ):
        (folder / name).write_bytes(pickle.dumps(content))
    source = _from_torchvision(Unchecked(str(tmp_path), train=True))
    assert source.class_names == ["airplane", "automobile"]
    assert (source.ready(np.array([3, 5]), 32, 3) == images[[3, 5]].transpose(0, 2, 3, 1)).all()
    assert source.ready(np.array([3]), 32, 1) is None  # it has to be converted to grey
    assert (np.asarray(source.image(7)) == images[7].transpose(1, 2, 0)).all()
    assert source.labels.tolist() == [0, 1] * 10


def test_webdataset_shards_are_read(tmp_path):
    pytest.importorskip("webdataset")
    for name, samples in (("x-train-0", range(20)), ("x-train-1", range(20, 40)), ("x-val-0", range(35, 45))):
        write_shard(tmp_path / f"{name}.tar", samples)
    data = opened("wds/x", 8, 3, root=str(tmp_path))
    assert data.class_names == ["5", "6"]
    assert len(data.train_and_val()) == 39
    assert any(note.startswith("skipped 1 unreadable images in wds/x") for note in data.notes)
    assert len(data.test()) == 10
    assert any(note.startswith("5 of 10 test images are exact copies") for note in data.notes)
    expected = torch.tensor(square(picture(36), 3, 8)).float()
    torch.testing.assert_close(pixels(data.test().eval_batch([1])[0])[0], expected, atol=0.01, rtol=0)
    with pytest.raises(GreedyNASError, match="1 unreadable images"):
        opened("wds/x", 8, 3, root=str(tmp_path), unreadable="refuse")
    with pytest.raises(GreedyNASError, match=r"does not fit .* raise data.memory_gb, or unpack it"):
        opened("wds/x", 8, 3, root=str(tmp_path), memory_gb=1e-6)


def test_hugging_face_sets_are_read(tmp_path):
    pytest.importorskip("datasets")
    paint(tmp_path / "set" / "train", {"a": 10, "b": 10})
    paint(tmp_path / "set" / "test", {"a": 3, "b": 3}, first=1)
    memory, disk = (
        opened(f"hfds/{tmp_path}/set", 8, 3, root=str(tmp_path / "cache"), memory_gb=limit) for limit in (1, 0)
    )
    folder = opened(tmp_path / "set", 8, 3)
    assert folder.class_names == memory.class_names
    assert (len(memory.train), len(memory.val), len(memory.test())) == (18, 2, 6)
    assert same_batches(memory.train.train_batches(0, 8), disk.train.train_batches(0, 8))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("torch/cifar10", "cannot read torch/cifar10 in .*not found.*; name its folder with .* \\(--data-root after"),
        ("torch/mnist", "cannot read torch/mnist in .*not found"),
        ("torch/imagenet", "cannot read torch/imagenet"),
        ("torch/cifar1", "unknown torchvision data set 'torch/cifar1' .did you mean 'torch/cifar10'.*"),
        ("cifar10", "no such data: 'cifar10'; did you mean torch/cifar10"),
        ("", "no such data: ''; give a folder"),
        ("x" * 5000, "cannot read x"),
        ("no/such/folder", "no such data: 'no/such/folder'; give a folder with train/"),
        (__file__, "is a file; give a folder"),
    ],
)
def test_missing_data_is_one_clear_line(tmp_path, source, message):
    with pytest.raises(GreedyNASError, match=message) as error:
        opened(source, root=str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "package"), [("hfds", "datasets"), ("hfids", "datasets"), ("wds", "webdataset"), ("tfds", "tensorflow-datasets")])  # fmt: skip
def test_missing_packages_are_named(kind, package):
    if find_spec(package.replace("-", "_")):
        pytest.skip(f"{package} is installed")
    with pytest.raises(GreedyNASError, match=f"{kind}/some/set needs the package {package}, .* pip install {package}$"):
        opened(f"{kind}/some/set")


# Wrong folders and settings


def folder_problems():
    yield "no images in", lambda root: (root / "train" / "a").mkdir(parents=True)
    yield "no images in", lambda root: None
    yield "no images of class c in", lambda root: (paint(root, {"a": 5, "b": 5}), (root / "c").mkdir())
    yield "at least two classes are needed, but the data has a", lambda root: paint(root, {"a": 9})
    yield "not in class folders", lambda root: picture(0).save(root / "a.png")
    yield "not in class folders", lambda root: ((root / "train").mkdir(), picture(0).save(root / "train" / "a.png"))
    yield "class 'b' has too few images .2.: at least 3", lambda root: paint(root, {"a": 9, "b": 2})
    yield (
        "has no train/ beside test/ and val/",
        lambda root: (paint(root / "test", {"a": 2}), paint(root / "val", {"a": 2})),
    )
    yield (
        "the test set has a class 'c' that the training set lacks",
        lambda root: (
            paint(root / "train", {"a": 9, "b": 9}),
            paint(root / "test", {"a": 2, "c": 2}),
        ),
    )
    yield (
        "the validation set has a class 'c'",
        lambda root: (
            paint(root / "train", {"a": 9, "b": 9}),
            paint(root / "test", {"a": 2}),
            paint(root / "val", {"c": 2}),
        ),
    )
    yield (
        "mean the same split",
        lambda root: [paint(root / name, {"a": 3, "b": 3}) for name in ("train", "val", "valid")],
    )


@pytest.mark.parametrize(("message", "make"), list(folder_problems()))
def test_wrong_folders_are_one_clear_line(tmp_path, message, make):
    make(tmp_path)
    with pytest.raises(GreedyNASError, match=message) as error:
        opened(tmp_path, 8, 3)
    assert "\n" not in str(error.value)


def test_a_test_set_may_lack_classes(tmp_path):
    paint(tmp_path / "train", {"a": 9, "b": 9, "c": 9})
    paint(tmp_path / "test", {"c": 4}, first=1)
    assert opened(tmp_path, 8, 3).test().labels.tolist() == [2] * 4


@pytest.mark.parametrize(
    "settings",
    [{"val_images": 0}, {"val_images": 1.5}, {"test_images": 0.0}, {"val_images": -3}, {"augment": "mixup"}, {"pad": -1},
     {"min_scale": 0}, {"crop_fraction": 1.5}, {"memory_gb": -1}, {"workers": -1}, {"unreadable": "ignore"}, {"sauce": "x"}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        DataSettings(**settings)


def test_counts_and_fractions_keep_their_type():
    settings = DataSettings.model_validate({"val_images": 500, "test_images": 0.5})
    assert (settings.val_images, settings.test_images) == (500, 0.5)
    assert isinstance(settings.val_images, int)
    assert DataSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_other_numbers_of_channels_are_refused():
    with pytest.raises(GreedyNASError, match="not 5"):
        opened(channels=5)


def test_the_sample_can_be_made_again(tmp_path, monkeypatch):
    """Run the tool on a small stand-in for the original files."""
    for prefix, n in (("train", 9000), ("t10k", 2500)):
        labels = (np.arange(n) % 10).astype(np.uint8)
        images = np.broadcast_to((np.arange(n) % 251).astype(np.uint8)[:, None, None], (n, 28, 28))
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            (tmp_path / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(np.ascontiguousarray(array)), 1))
    tool = FASHION.parents[2] / "tools" / "make_fashion_sample.py"
    monkeypatch.setattr(sys, "argv", [str(tool), str(tmp_path), str(tmp_path / "out.npz")])
    runpy.run_path(str(tool), run_name="__main__")
    with np.load(tmp_path / "out.npz", allow_pickle=False) as arrays:
        assert arrays["train_images"].shape == (8000, 28, 28)
        assert np.bincount(arrays["test_labels"]).tolist() == [200] * 10
