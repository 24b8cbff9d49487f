"""Files of strangers in every format: `greedynas predict` refuses them in one line, and they change no file."""

import os
import pickle
import shutil
import struct
import zipfile

import numpy as np
import pytest

from greedynas.deploy.formats import FORMATS
from greedynas.deploy.formats.format import Conversion
from tests.helpers.model_files import SE, make_card, trained_network

pytestmark = pytest.mark.usefixtures("one_thread")

ORIGINALS = ("onnx", "openvino", "executorch", "litert", "ncnn", "coreml", "pt2")
HOWS = (
    "random",
    "another type",
    "endless link",
    "huge sizes",
    "folder",
    "pipe",
    "hostile card",
)
PARTS = ("no weights", "short weights", "random weights", "endless weights")


class Touch:
    """A pickle that makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mknod, (str(self.file),)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Return a function that returns a folder with the fp32 file of a format, made once."""
    made = {}

    def original(name):
        format = FORMATS[name]()
        if not format.is_installed(converting=True):
            pytest.skip(f"needs pip install greedynas[{name}]")
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            card = make_card(SE)
            source = Conversion(trained_network(card), card, lambda: iter(()))
            format.convert(source, "fp32", folder / format.file_name("fp32"))
            (folder / "model.json").write_text(card.model_dump_json(exclude_none=True))
            made[name] = folder
        return made[name]

    return original


def contents(folder):
    """Return all names below a folder, and the bytes of its files."""
    return {
        one.relative_to(folder): one.read_bytes() if one.is_file() and not one.is_symlink() else None
        for one in folder.rglob("*")
    }


def enlarged(data):
    """Return data whose small numbers, such as counts and sizes, are huge."""
    words = np.frombuffer(data[: len(data) // 4 * 4], "<u4").copy()
    small = (words > 0) & (words < 100_000)
    small[:3] = False  # keep the beginning, by which the kind of a file is recognised
    words[np.flatnonzero(small)[:64]] = 0x7FFFFFF0
    return words.tobytes()


def harm(file, how, card):
    """Replace a file by a hostile one."""
    data = file.read_bytes() if file.is_file() else b""
    if file.is_dir() or how in ("endless link", "folder", "pipe"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    if how == "random":
        file.write_bytes(np.random.default_rng(0).bytes(max(len(data), 4096)))
    elif how == "another type":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("data.pkl", pickle.dumps(Touch(file.with_name("touched"))))
    elif how == "endless link":
        file.symlink_to("/dev/zero")
    elif how == "huge sizes":
        text = data[:4] in (b"7767", b"<?xm")
        huge = data.replace(b"8", b"99999999") if text else enlarged(data)
        file.write_bytes(huge or struct.pack("<Q", 2**62) * 8)
    elif how == "folder":
        file.mkdir()
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "hostile card":
        card.write_bytes(b'{"class_names": [' + b'"\x1b[2J",' * 1000)


def refused(run_cli, folder, file, image, *options):
    """Predict with a file, and check that it is refused in one line and that nothing has changed."""
    before = contents(folder)
    code, out, err = run_cli("predict", file, image, *options)
    assert (code, out, err.strip().count("\n")) == (2, "", 0), err
    assert "Traceback" not in err
    assert "\x1b" not in err
    assert contents(folder) == before
    return err


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in ORIGINALS for how in HOWS if (name, how) != ("onnx", "hostile card")],  # it is in the file
)
def test_hostile_files_are_refused_in_one_line(name, how, originals, tmp_path, run_cli, photos):
    folder = shutil.copytree(originals(name), tmp_path / "files")
    file = folder / FORMATS[name]().file_name("fp32")
    harm(file, how, folder / "model.json")
    refused(run_cli, folder, file, next(photos.rglob("*.png")))


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in ("openvino", "ncnn") for how in PARTS if (name, how) != ("openvino", "random weights")],
)
def test_hostile_weights_are_refused_in_one_line(name, how, originals, tmp_path, run_cli, photos):
    folder = shutil.copytree(originals(name), tmp_path / "files")
    file = folder / FORMATS[name]().file_name("fp32")
    (weights,) = FORMATS[name]().parts(file)
    data = weights.read_bytes()
    weights.unlink()
    if how == "short weights":
        weights.write_bytes(data[:100])
    elif how == "random weights":
        weights.write_bytes(np.random.default_rng(0).bytes(len(data)))
    elif how == "endless weights":
        weights.symlink_to("/dev/zero")
    refused(run_cli, folder, file, next(photos.rglob("*.png")))


def test_a_pickle_in_a_pt2_file_is_not_opened(originals, tmp_path, run_cli, photos):
    folder = shutil.copytree(originals("pt2"), tmp_path / "files")
    with zipfile.ZipFile(folder / "model.pt2") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    samples = next(name for name in parts if "sample_inputs" in name)
    with zipfile.ZipFile(folder / "model.pt2", "w") as archive:
        for name, data in {**parts, samples: pickle.dumps(Touch(folder / "touched"))}.items():
            archive.writestr(name, data)
    assert "add --trust" in refused(run_cli, folder, folder / "model.pt2", next(photos.rglob("*.png")))


@pytest.mark.parametrize("how", ["random", "another type", "truncated", "another network", "pipe", "endless link"])
def test_a_damaged_pt2_file_that_is_trusted_is_one_line(how, originals, tmp_path, run_cli, photos):
    folder = shutil.copytree(originals("pt2"), tmp_path / "files")
    file = folder / "model.pt2"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:3000])
    elif how == "another network":
        card = make_card(SE.adapt(image_channels=1))
        (folder / "model.json").write_text(card.model_dump_json(exclude_none=True))
    else:
        harm(file, how, folder / "model.json")
    assert str(file) in refused(run_cli, folder, file, next(photos.rglob("*.png")), "--trust")
