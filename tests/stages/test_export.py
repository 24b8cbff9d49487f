import io
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from rich.console import Console

from greedynas import GreedyNASError, load_network, load_space
from greedynas.data.datasets import open_data
from greedynas.data.settings import DataSettings
from greedynas.deploy import onnx_files
from greedynas.deploy.formats import onnx_format, shared
from greedynas.deploy.formats.onnx_format import OnnxFormat
from greedynas.deploy.onnx_checks import open_session
from greedynas.deploy.onnx_files import make_onnx, run_session
from greedynas.runtime.files import write_json
from greedynas.stages import export
from greedynas.stages.export import export_stage
from greedynas.stages.export_files import finished_export
from greedynas.stages.export_report import report_export
from tests.helpers.exports import QUIET, make_run
from tests.helpers.model_files import SE, SHUFFLE, make_card, save_trained, trained_network

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(exported, tmp_path):
    """Copy the exported run, so that a test may change it."""
    return Path(shutil.copytree(exported, tmp_path / "run"))


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("model*"))}


def ops(model):
    return {node.op_type for node in model.graph.node}


# Contents of the files


def test_the_files_of_an_export(exported, photos):
    home = exported / "models" / "best"
    result = json.loads((home / "export.json").read_text())
    files = {entry["file"]: entry for entry in result["files"]}
    assert list(files) == ["model.onnx", "model.fp16.onnx", "model.int8.onnx", "model.safetensors"]
    assert [entry["format"] for entry in files.values()] == ["onnx", "onnx", "onnx", "safetensors"]
    assert [entry["precision"] for entry in files.values()] == ["fp32", "fp16", "int8", "fp32"]
    assert [entry["latency_ms"] is None for entry in files.values()] == [False, False, False, True]
    assert all(entry["latency_ms"] > 0 for name, entry in files.items() if name != "model.safetensors")
    assert all(entry["bytes"] == (home / name).stat().st_size for name, entry in files.items())
    assert (result["schema_version"], result["threads"], result["images"], result["skipped"]) == (1, 1, 6, [])
    assert files["model.onnx"]["agrees"]["images"] == 42  # as many as there are, up to 100
    assert 0 < files["model.onnx"]["agrees"]["max_difference"] < 1e-4
    for name in ("model.onnx", "model.safetensors"):
        assert (exported / name).read_bytes() == (home / name).read_bytes()
    assert json.loads((home / "model.json").read_text())["class_names"] == ["a", "b", "c"]
    assert not list(exported.rglob("*.tmp"))


def test_accuracies_are_those_of_the_files(exported, photos):
    home = exported / "models" / "best"
    settings = DataSettings(source=str(photos), workers=0, pad=1, val_images=12, test_images=6)
    data = open_data(settings, image_size=8, image_channels=3, seed=0, device=torch.device("cpu"))
    images, labels = data.test().eval_batch()
    for entry in json.loads((home / "export.json").read_text())["files"]:
        if entry["file"].endswith(".onnx"):
            session = onnxruntime.InferenceSession(home / entry["file"], providers=["CPUExecutionProvider"])
            logits = session.run(["logits"], {"images": images.contiguous().numpy()})[0]
        else:
            logits = load_network(home)[0](images).detach().numpy()
        assert entry["top1"] == pytest.approx((logits.argmax(1) == labels.numpy()).mean())


@pytest.mark.parametrize("name", ["model.onnx", "model.fp16.onnx", "model.int8.onnx"])
def test_an_onnx_file_describes_itself(exported, name):
    file = exported / "models" / "best" / name
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} | {opset.domain for opset in model.opset_import} == {""}
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (image,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (image.name, image.type, image.shape[1:]) == ("images", "tensor(float)", [3, 8, 8])
    assert (logits.name, logits.type, logits.shape[1:]) == ("logits", "tensor(float)", [3])
    assert isinstance(image.shape[0], str)  # the batch size is free
    for count in (1, 5, 32):
        assert session.run(None, {"images": np.zeros((count, 3, 8, 8), np.float32)})[0].shape == (count, 3)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["greedynas"]) == json.loads(make_card().model_dump_json(exclude_none=True))
    assert json.loads(about["classes"]) == ["a", "b", "c"]
    for text in ("8-bit RGB", "8 x 8 pixels", "0.485, 0.456, 0.406", "0.229, 0.224, 0.225", "softmax"):
        assert text in about["preprocessing"]
    for left in (b"site-packages", str(Path.cwd()).encode(), b"stack_trace", b"pkg.torch"):
        assert left not in file.read_bytes()


def test_the_graphs_are_small_and_clean(exported):
    home = exported / "models" / "best"
    model = onnx.load(home / "model.onnx")
    assert "BatchNormalization" not in ops(model)
    assert ops(model) <= {"Conv", "Relu", "HardSwish", "HardSigmoid", "ReduceMean", "Mul", "Add", "Gemm"}
    half, weights = onnx.load(home / "model.fp16.onnx"), onnx.load(home / "model.int8.onnx").graph.initializer
    assert {tensor.data_type for tensor in half.graph.initializer} <= {onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64}
    assert sum(node.op_type == "Cast" for node in half.graph.node) == 2  # input and output
    by_name = {tensor.name: tensor for tensor in weights}
    convolution = next(t for t in weights if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 4)
    scales = by_name[convolution.name.replace("_quantized", "_scale")]
    assert list(scales.dims) == [convolution.dims[0]]  # one for each output channel
    assert np.abs(onnx.numpy_helper.to_array(convolution)).max() <= 64  # 7 bits


def test_preprocessing_in_words_for_grey_and_cropped_images():
    card = make_card(load_space("fashion"), class_names=tuple("abcdefghij"), crop_fraction=0.875)
    text = onnx_files.preprocessing(card)
    assert "8-bit grey" in text
    assert "to 32 x 32 pixels" in text
    assert "central 28 x 28" in text
    assert "float32 (batch, 1, 28, 28)" in text


# ONNX Runtime and PyTorch


@pytest.fixture(scope="module")
def fashion():
    """Return 100 real images in grey and in colour."""
    settings = DataSettings(source="fashion", workers=0)
    return {
        channels: open_data(settings, image_size=28, image_channels=channels, seed=0, device=torch.device("cpu"))
        .test()
        .eval_batch(np.arange(100))[0]
        for channels in (1, 3)
    }


def balance(classifier, logits):
    """Shift the classifier so that no class dominates, and most images have a clear class."""
    scale = 3 / logits.std(0).mean()
    classifier.weight *= scale
    classifier.bias.copy_((classifier.bias - logits.mean(0)) * scale)


@pytest.mark.parametrize(
    "space",
    [
        "fashion",
        SE.adapt(image_size=28),
        SHUFFLE.adapt(image_size=28),
        pytest.param("mobilenetv3_small_050", id="timm"),
    ],
)
def test_onnx_runtime_and_pytorch_agree(fashion, space):
    if space == "fashion":
        space = load_space("fashion")
    sizes = {"image_size": 28} if isinstance(space, str) else {}
    card = make_card(space, class_names=tuple("abcdefghij"), **sizes)
    network = trained_network(card)
    images = fashion[card.image_channels].contiguous()
    with torch.no_grad():
        balance(network.get_classifier(), network(images))
        expected = network(images).softmax(1)
    margins = expected.topk(2).values
    sure = margins[:, 0] - margins[:, 1] > 1e-3
    assert sure.sum() > 90
    assert len(expected.argmax(1).unique()) > 3
    session = open_session(make_onnx(network, card).SerializeToString())
    for batch in (1, 32):
        found = torch.cat([torch.from_numpy(run_session(session, part)) for part in images.split(batch)]).softmax(1)
        assert (found - expected).abs().max() < 1e-4
        assert torch.equal(found.argmax(1)[sure], expected.argmax(1)[sure])


def test_a_network_that_cannot_be_exported():
    class Undecided(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x  # depends on the values, so no graph can be traced

    with pytest.raises(GreedyNASError, match="PyTorch cannot export best to ONNX") as error:
        make_onnx(Undecided().eval(), make_card())
    assert "\n" not in str(error.value)


def with_classifier(file, scale):
    """Return the model of a file with other weights in its classifier."""
    model = onnx.load(file)
    weights = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [3, 16])
    changed = scale * onnx.numpy_helper.to_array(weights)
    weights.CopyFrom(onnx.numpy_helper.from_array(changed.astype(np.float32), weights.name))
    return model


def test_a_file_that_differs_from_pytorch_is_not_written(run, monkeypatch):
    other = with_classifier(run / "model.onnx", 1.01)
    monkeypatch.setattr(shared, "make_onnx", lambda *_: other)
    (run / "models" / "best" / "export.json").unlink()
    with pytest.raises(GreedyNASError, match=r"differs from PyTorch by 0\.0\d+ .*is not written"):
        export_stage(run, QUIET)
    assert not list(run.rglob("*.onnx"))


# Repeated and interrupted exports


def test_a_finished_export_is_not_repeated(run, monkeypatch):
    monkeypatch.setattr(export, "write_files", lambda *_: pytest.fail("exported again"))
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*.onnx")}
    result = export_stage(run, QUIET)
    assert result == json.loads((run / "models" / "best" / "export.json").read_text())
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*.onnx")} == before
    (run / "model.onnx").unlink()
    export_stage(run, QUIET, formats=["onnx"])
    assert (run / "model.onnx").read_bytes() == (run / "models" / "best" / "model.onnx").read_bytes()


def test_other_weights_give_other_files(run):
    home = run / "models" / "best"
    before, record = contents(home), json.loads((home / "export.json").read_text())
    save_trained(home / "model.safetensors", make_card(), seed=5)
    result = export_stage(run, QUIET)
    after = contents(home)
    assert result["weights"] != record["weights"]
    assert all(after[name] != before[name] for name in after if name != "model.json")
    assert (run / "model.safetensors").read_bytes() == after["model.safetensors"]


def test_an_interrupted_export_ends_with_the_same_files(run, monkeypatch):
    home = run / "models" / "best"
    whole = contents(home)

    def stop(*_):
        raise KeyboardInterrupt

    (home / "export.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(export, "accuracies", stop)
        patch.setattr(shared, "make_onnx", lambda *_: onnx.load_from_string(whole["model.onnx"]))
        with pytest.raises(KeyboardInterrupt):
            export_stage(run, QUIET)
    assert not (home / "export.json").exists()
    export_stage(run, QUIET)
    assert contents(home) == whole


@pytest.mark.parametrize("name", ["model.int8.onnx", "model.json", "export.json"])
def test_a_damaged_export_is_made_again(run, monkeypatch, name):
    def again(*_):
        raise InterruptedError

    monkeypatch.setattr(export, "write_files", again)
    export_stage(run, QUIET)
    file = run / "models" / "best" / name
    file.unlink() if name == "model.json" else file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InterruptedError):
        export_stage(run, QUIET, formats=["onnx"])


def test_one_format(photos, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", photos)
    result = export_stage(run, QUIET, formats=["safetensors"])
    home = run / "models" / "best"
    assert sorted(file.name for file in home.iterdir()) == ["export.json", "model.json", "model.safetensors"]
    assert [entry["file"] for entry in result["files"]] == ["model.safetensors"]
    assert not (run / "model.onnx").exists()
    monkeypatch.setattr(export, "write_files", lambda *arguments: pytest.fail(f"asked for {arguments[4]}"))
    export_stage(run, QUIET, formats=["safetensors"])
    with pytest.raises(pytest.fail.Exception, match="'onnx', 'safetensors'"):  # earlier files stay
        export_stage(run, QUIET, formats=["onnx"])


# Errors


def test_int8_is_calibrated_on_training_images(run, data, monkeypatch):
    seen = []

    def watch(model, card, batches):
        seen.extend(image.tobytes() for batch in batches for image in batch)
        raise RuntimeError("no instruction\nfor this")

    model = onnx.load(run / "model.onnx")
    monkeypatch.setattr(shared, "make_onnx", lambda *_: model)
    monkeypatch.setattr(onnx_format, "to_int8", watch)
    (run / "models" / "best" / "export.json").unlink()
    result = export_stage(run, QUIET, data=data)
    training = {image.numpy().tobytes() for image in data.train.eval_batch()[0].contiguous()}
    assert set(seen) == training
    # The precision that failed is reported in one line, and the other files exist.
    assert result["skipped"] == [{"file": "model.int8.onnx", "why": "no instruction for this"}]
    assert [entry["file"] for entry in result["files"]] == ["model.onnx", "model.fp16.onnx", "model.safetensors"]
    assert not (run / "models" / "best" / "model.int8.onnx").exists()
    assert "model.int8.onnx is left out" in (run / "log.txt").read_text()
    # It is tried again where it may work: on another machine, in another version.
    assert finished_export(run / "models" / "best", result["weights"]) == result
    write_json(run / "models" / "best" / "export.json", {**result, "machine": "another"})
    assert finished_export(run / "models" / "best", result["weights"]) is None
    console = Console(file=io.StringIO(), width=140)
    report_export(result, run, console)
    assert "left out: model.int8.onnx (no instruction for this)" in console.file.getvalue()


def test_files_with_outputs_that_are_not_finite_are_left_out(exported, data, monkeypatch, tmp_path):
    model, broken = onnx.load(exported / "model.onnx"), with_classifier(exported / "model.onnx", np.inf)
    monkeypatch.setattr(shared, "make_onnx", lambda *_: model)
    monkeypatch.setattr(onnx_format, "to_fp16", lambda *_: broken)
    made, skipped = export.convert(tmp_path, OnnxFormat(), load_network(exported)[0], make_card(), data.train)
    assert [one.precision for one in made] == ["fp32", "int8"]
    assert skipped == {"model.fp16.onnx": "its outputs are not finite"}
    assert not (tmp_path / "model.fp16.onnx").exists()


def test_the_root_logger_is_left_alone(exported, data, monkeypatch, capsys, tmp_path):
    """Check that no handler is added to the root logger, where it would print every message of greedynas."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    _, skipped = export.convert(tmp_path, OnnxFormat(), load_network(exported)[0], make_card(), data.train)
    assert (root.handlers, skipped) == ([], {})
    assert capsys.readouterr() == ("", "")


def test_wrong_input(exported, photos, tmp_path):
    with pytest.raises(GreedyNASError, match=r"unknown format 'onxx' .did you mean 'onnx'"):
        export_stage(exported, QUIET, formats=["onxx"])
    for name in ("nothing", "../best", ".."):
        with pytest.raises(GreedyNASError, match="has no trained network"):
            export_stage(exported, QUIET, model=name)
    with pytest.raises(GreedyNASError, match="not a run directory"):
        export_stage(tmp_path, QUIET)
    run = make_run(tmp_path / "run", photos, make_card(class_names=("a", "b", "d")))
    with pytest.raises(
        GreedyNASError, match=r"was trained for 3 classes \(a, b, d…\), but the data has 3 \(a, b, c…\)"
    ):
        export_stage(run, QUIET)
    (run / "models" / "best" / "model.safetensors").unlink()
    with pytest.raises(GreedyNASError, match="has no trained network 'best'; train it with greedynas retrain"):
        export_stage(run, QUIET)


def test_another_network_does_not_replace_the_chosen_one(run, data):
    save_trained(run / "models" / "rival" / "model.safetensors", make_card(SHUFFLE, name="rival"), seed=3)
    before = (run / "model.safetensors").read_bytes()
    result = export_stage(run / "models" / "rival", QUIET, data=data, formats=["safetensors"])  # by its folder
    assert result["model"] == "rival"
    assert (run / "models" / "rival" / "model.json").is_file()
    assert (run / "model.safetensors").read_bytes() == before


def test_the_report(exported):
    console = Console(file=io.StringIO(), width=140)
    report_export(json.loads((exported / "models" / "best" / "export.json").read_text()), exported, console)
    text = console.file.getvalue()
    for part in ("model.int8.onnx", "fp16", "top-1", "latency", "6 test images", "agree within"):
        assert part in text
