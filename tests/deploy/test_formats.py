"""Each export format in its own runtime. Those whose packages are not installed are skipped, with the extra's name."""

import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from greedynas import GreedyNASError
from greedynas.deploy.formats import FORMATS
from greedynas.deploy.formats.format import Conversion, format_of
from greedynas.deploy.prediction import open_model
from greedynas.models.model_file import save_network
from greedynas.runtime.files import read_json
from greedynas.stages import export
from greedynas.stages.export import export_stage
from greedynas.stages.export_report import losses
from tests.helpers.exports import QUIET, make_run
from tests.helpers.model_files import SE, SHUFFLE, make_card, trained_network
from tests.helpers.paths import ROOT
from tests.helpers.plugins import Toy, registered

pytestmark = pytest.mark.usefixtures("one_thread")

RUN_HERE = ("pt2", "openvino", "executorch", "litert", "ncnn")


def installed(name):
    format = FORMATS[name]()
    if not format.is_installed(converting=True):
        pytest.skip(f"needs pip install greedynas[{name}]")
    return format


def network_of(space):
    card = make_card(space)
    return trained_network(card), card


@pytest.fixture(scope="module")
def images():
    return torch.randn(33, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("space", [SE, SHUFFLE], ids=["se", "shuffle"])
@pytest.mark.parametrize("name", RUN_HERE)
def test_files_agree_with_pytorch(name, space, images, tmp_path):
    format = installed(name)
    if name == "executorch" and space is SHUFFLE:
        pytest.skip("its conversion takes too long; benchmarks/scripts/deployment_formats.py has ShuffleNet units")
    network, card = network_of(space)
    with torch.no_grad():
        expected = network(images).softmax(1)
    source = Conversion(network, card, lambda: iter(images.split(16)))
    (tmp_path / "model.json").write_text(card.model_dump_json(exclude_none=True))
    for precision in format.precisions:
        file = tmp_path / format.file_name(precision)
        format.convert(source, precision, file)
        assert all((tmp_path / part).is_file() for part in (file.name, *format.companions(precision)))
        assert format_of(file).name == name
        classify, found_card = open_model(file, trust=True)  # as a stranger's file, in a process of its own
        assert found_card == card
        for run in (classify, format.open(file, threads=1)):
            found = torch.cat([run(part) for part in (images[:1], images[1:])]).softmax(1)
            difference = (found - expected).abs().max()
            if precision == format.reference:
                assert difference < 1e-4
            else:  # another computation, but of the same network
                assert 0 < difference < 0.15
                assert (found.argmax(1) == expected.argmax(1)).float().mean() > 0.8
        assert format.runner(file, images[:1], 1)() > 0
    assert format.runtime().split()[1][0].isdigit()


def test_quantisation_is_by_channel_and_uses_the_images(images, tmp_path):
    """Two networks whose channels differ by a factor of 1000: one scale for all channels would lose the small ones."""
    for name in ("openvino", "litert"):
        if not FORMATS[name]().is_installed(converting=True):
            continue
        network, card = network_of(SE)
        with torch.no_grad():
            conv = network.stem[0].conv
            conv.weight[::2] *= 1000
            network.stem[0].norm.running_var[::2] *= 1e6
            expected = network(images).softmax(1)
        format, file = FORMATS[name](), tmp_path / FORMATS[name]().file_name("int8")
        format.convert(Conversion(network, card, lambda: iter(images.split(16))), "int8", file)
        assert (format.open(file, 1)(images).softmax(1) - expected).abs().mean() < 0.05


DAMAGES = ("truncated", "another network", "empty", "text", "zeroed")


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in ("openvino", "litert", "ncnn") for how in DAMAGES]
    + [("executorch", how) for how in DAMAGES[:2]],  # its process takes seconds to import PyTorch
)
def test_damaged_files_are_one_line_and_write_nothing(name, how, images, tmp_path, converted):
    folder = converted(name)
    if folder is None:
        pytest.skip(f"needs pip install greedynas[{name}]")
    shutil.copytree(folder, tmp_path / "files")
    format = FORMATS[name]()
    file = tmp_path / "files" / format.file_name("fp32")
    data = file.read_bytes()
    if how == "another network":
        other = make_card(SE.adapt(num_classes=5), class_names=tuple("abcde"))
        (file.parent / "model.json").write_text(other.model_dump_json(exclude_none=True))
    else:
        changed = {"empty": b"", "text": b"not a model", "truncated": data[: len(data) // 2]}
        file.write_bytes(changed.get(how, data[:8] + bytes(len(data) - 8)))
    before = {one: one.read_bytes() for one in file.parent.rglob("*") if one.is_file()}

    def run():
        classify, _ = open_model(file)
        classify(images[:1])

    with pytest.raises(GreedyNASError) as error:
        run()
    assert "\n" not in str(error.value)
    assert file.name in str(error.value)
    assert {one: one.read_bytes() for one in file.parent.rglob("*") if one.is_file()} == before


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return a function that returns a folder with the fp32 file of a format, converted once, or None."""
    made = {}

    def convert(name):
        format = FORMATS[name]()
        if not format.is_installed(converting=True):
            return None
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            network, card = network_of(SE)
            format.convert(Conversion(network, card, lambda: iter(())), "fp32", folder / format.file_name("fp32"))
            (folder / "model.json").write_text(card.model_dump_json(exclude_none=True))
            made[name] = folder
        return made[name]

    return convert


def test_pt2_files_are_opened_only_if_they_are_trusted(tmp_path, run_cli, photos):
    network, card = network_of(SE)
    FORMATS["pt2"]().convert(Conversion(network, card, lambda: iter(())), "fp32", tmp_path / "model.pt2")
    (tmp_path / "model.json").write_text(card.model_dump_json(exclude_none=True))
    save_network(tmp_path / "model.safetensors", network, card)
    image = next(photos.rglob("*.png"))
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:  # it is published, so it names no folder of this machine
        assert not any(str(ROOT).encode() in archive.read(name) for name in archive.namelist())
    code, out, err = run_cli("predict", tmp_path / "model.pt2", image)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "can execute code: add --trust" in err
    code, out, err = run_cli("predict", tmp_path / "model.pt2", image, "--trust")
    assert (code, err) == (0, "")
    assert out == run_cli("predict", tmp_path / "model.safetensors", image)[1]


def test_core_ml_is_converted_and_not_run(photos, tmp_path):
    installed("coreml")
    run = make_run(tmp_path / "run", photos)
    result = export_stage(run, QUIET, formats=["coreml"], precisions=["fp16"])
    assert [(entry["file"], entry["top1"]) for entry in result["files"]] == [
        ("model.mlpackage", None),
        ("model.fp16.mlpackage", None),
    ]
    sizes = {entry["precision"]: entry["bytes"] for entry in result["files"]}
    assert sizes["fp16"] < sizes["fp32"]
    assert export_stage(run, QUIET, formats=["coreml"], precisions=["fp16"]) == result  # nothing is converted again
    with pytest.raises(GreedyNASError, match=r"this machine cannot run .*: it has no Core ML"):
        open_model(run / "models" / "best" / "model.mlpackage")


# Exports in several steps


def test_precisions_are_chosen_and_added(photos, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", photos)
    with registered(FORMATS, toy=Toy):
        first = export_stage(run, QUIET, formats=["toy"], precisions=["fp32"])
        assert [entry["precision"] for entry in first["files"]] == ["fp32"]
        made = []
        convert = Toy.convert
        monkeypatch.setattr(
            Toy,
            "convert",
            lambda self, source, precision, file: made.append(precision) or convert(self, source, precision, file),
        )
        second = export_stage(run, QUIET, formats=["toy"], precisions=["bf16"])
        assert made == ["bf16"]
        assert [entry["precision"] for entry in second["files"]] == ["fp32", "bf16"]
        kept = {**second["files"][0]}
        assert {key: kept[key] for key in ("sha256", "top1", "agrees")} == {
            key: first["files"][0][key] for key in ("sha256", "top1", "agrees")
        }
        assert export_stage(run, QUIET, formats=["toy"], precisions=["bf16"]) == second
        with pytest.raises(GreedyNASError, match=r"unknown precision 'int4'.*known: fp32, bf16, ternary"):
            export_stage(run, QUIET, formats=["toy"], precisions=["int4"])


def test_files_of_a_runtime_that_is_missing_here_stay(photos, tmp_path, monkeypatch):
    """Formats that need different environments are exported one after the other into the same run."""
    run = make_run(tmp_path / "run", photos)
    with registered(FORMATS, toy=Toy):
        first = export_stage(run, QUIET, formats=["toy"])
        monkeypatch.setattr(Toy, "packages", {"no_such_runtime": "no-such-runtime"})
        second = export_stage(run, QUIET, formats=["safetensors"])
        assert second["formats"] == ["safetensors", "toy"]
        assert {entry["file"] for entry in second["files"]} == {
            "model.safetensors",
            *(one["file"] for one in first["files"]),
        }
        assert next(one for one in second["files"] if one["file"] == "model.toy") == first["files"][0]
        assert "toy 0.1" in second["runtime"]
        assert (run / "models" / "best" / "model.toy").is_file()
        assert read_json(run / "models" / "best" / "export.json") == second
        monkeypatch.setattr(export, "write_files", lambda *_: pytest.fail("exported again"))
        assert export_stage(run, QUIET, formats=["safetensors"]) == second


def test_a_loss_of_more_than_a_point_has_a_line_with_the_next_best():
    def entry(format, precision, top1, size):
        return {
            "file": f"model.{precision}.{format}",
            "format": format,
            "precision": precision,
            "top1": top1,
            "bytes": size,
        }

    files = [
        entry("onnx", "fp32", 0.9, 4_000_000),
        entry("onnx", "fp16", 0.899, 2_000_000),
        entry("onnx", "int8", 0.85, 1_000_000),
    ]
    assert list(losses(files)) == [
        "model.int8.onnx loses 5.0 points of accuracy against model.fp32.onnx; the next best is model.fp16.onnx (2.00 MB, 89.90%)"
    ]
    assert list(losses([files[0], entry("onnx", "int8", 0.8901, 1)])) == []
    others = [files[0], files[2], entry("openvino", "int8", 0.895, 1_100_000), entry("coreml", "fp16", None, 5)]
    assert next(iter(losses(others))).endswith("the next best is model.int8.openvino (1.10 MB, 89.50%)")


@pytest.mark.parametrize("name", ["openvino", "executorch", "litert", "ncnn", "coreml"])
def test_a_missing_extra_is_one_line_with_its_command(name, monkeypatch):
    from greedynas.runtime import packages

    format = FORMATS[name]()
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    with pytest.raises(
        GreedyNASError, match=rf"the format '{name}' needs .*: pip install 'greedynas\[{name}\]'"
    ) as error:
        format.check_packages(converting=True)
    assert "\n" not in str(error.value)
    if name == "litert":
        assert "torch below 2.15" in str(error.value)
        with pytest.raises(GreedyNASError, match=r"pip install ai-edge-litert$"):
            format.check_packages()


def test_nothing_is_imported_before_it_is_asked_for(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; from greedynas.deploy.formats.format import known_formats, format_of; from pathlib import Path\n"
        "assert format_of(Path('x.pte')).name == 'executorch' and len(list(known_formats())) > 5\n"
        "print([name for name in ('openvino', 'nncf', 'executorch', 'torchao', 'ncnn', 'coremltools', 'litert_torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "[]"
