import io
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from greedynas import GreedyNASError, Space, load_network, load_space
from greedynas.data.datasets import open_data
from greedynas.data.settings import DataSettings
from greedynas.deploy.prediction import Prediction, make_input, predict, prediction_facts, read_square, show_predictions
from greedynas.deploy.sandbox import process as sandbox
from greedynas.models.footprint import measure
from greedynas.models.model_file import KEY, make_network
from greedynas.runtime.terminal import make_console
from greedynas.spaces.space import Fixed, Stage
from tests.helpers import hostile_onnx
from tests.helpers.model_files import make_card, save_trained
from tests.helpers.paths import ROOT
from tests.helpers.pictures import picture, spoil

pytestmark = pytest.mark.usefixtures("one_thread")

DOCS = ROOT / "docs" / "guide" / "export.md"


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    """Return a folder with images of every kind, some of them in subfolders, and files that are not images."""
    folder = tmp_path_factory.mktemp("gallery")
    (folder / "more" / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    picture(1, (40, 30)).save(folder / "colour.png")
    picture(2, (9, 31), "L").save(folder / "grey.png")
    picture(3, (50, 50), "CMYK").save(folder / "print.jpg")
    picture(4, (33, 20), "RGBA").save(folder / "more" / "glass.PNG")
    picture(5, (20, 20), "P").save(folder / "more" / "palette.gif")
    Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20) * 160).save(folder / "more" / "deep" / "16bit.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(6, (40, 20)).save(folder / "turned.jpg", exif=exif)
    picture(7, (400, 300)).save(folder / "large.jpg")
    picture(8).save(folder / "broken.png")
    spoil(folder / "broken.png")
    picture(9).save(folder / ".hidden" / "a.png")
    (folder / "notes.txt").write_text("not for us")
    return folder


def probabilities(predictions):
    return [dict(prediction.classes) for prediction in predictions if prediction.error is None]


# Predictions


def test_weights_and_onnx_agree_on_all_kinds_of_images(exported, gallery):
    weights = list(predict(exported / "models" / "best", [gallery]))
    in_onnx = list(predict(exported / "model.onnx", [gallery]))
    names = [str(prediction.file.relative_to(gallery)) for prediction in weights]
    assert names == sorted(names) == sorted(str(p.file.relative_to(gallery)) for p in in_onnx)
    expected = "broken.png colour.png grey.png large.jpg more/deep/16bit.png more/glass.PNG more/palette.gif print.jpg turned.jpg"
    assert set(names) == set(expected.split())
    broken = [prediction for prediction in weights if prediction.error is not None]
    assert [prediction.file.name for prediction in broken] == ["broken.png"]
    assert "\n" not in broken[0].error
    assert len(probabilities(weights)) == 8
    for first, second in zip(probabilities(weights), probabilities(in_onnx), strict=True):
        assert list(first) == list(second)  # most likely class first
        assert list(first.values()) == sorted(first.values(), reverse=True)
        assert sum(first.values()) == pytest.approx(1)
        assert all(abs(first[name] - second[name]) < 1e-4 for name in first)
    assert len({max(one, key=one.get) for one in probabilities(weights)}) > 1


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_lower_precisions_predict_nearly_the_same(exported, gallery, precision):
    home = exported / "models" / "best"
    pairs = zip(
        *(probabilities(predict(model, [gallery])) for model in (home, home / f"model.{precision}.onnx")), strict=True
    )
    differences = [abs(first[name] - second[name]) for first, second in pairs for name in first]
    assert 0 < np.mean(differences) < {"fp16": 1e-3, "int8": 0.1}[precision]


@pytest.mark.parametrize("crop_fraction", [1.0, 0.7])
def test_images_are_preprocessed_as_in_evaluation(photos, crop_fraction):
    """The inputs are the same to the bit as those on which the network was tested."""
    settings = DataSettings(source=str(photos), workers=0, test_images=6, val_images=12, crop_fraction=crop_fraction)
    data = open_data(settings, image_size=8, image_channels=3, seed=0, device=torch.device("cpu"))
    expected = {image.numpy().tobytes() for image in data.train_and_val().eval_batch()[0].contiguous()}
    expected |= {image.numpy().tobytes() for image in data.test().eval_batch()[0].contiguous()}
    card = make_card(crop_fraction=crop_fraction)
    squares = [read_square(file, card) for file in sorted(photos.rglob("*.png"))]
    assert {image.numpy().tobytes() for image in make_input(squares, card).contiguous()} == expected


def test_the_batch_size_changes_nothing(exported, gallery):
    one, many = (list(predict(exported, [gallery], batch_size=size)) for size in (1, 32))
    for first, second in zip(one, many, strict=True):
        assert first.file == second.file
        assert dict(first.classes) == pytest.approx(dict(second.classes), abs=1e-5)


def test_named_images_keep_their_order(exported, gallery):
    names = [gallery / name for name in ("turned.jpg", "colour.png", "turned.jpg")]
    found = list(predict(exported, names, top=2))
    assert [prediction.file for prediction in found] == names
    assert found[0] == found[2] != found[1]
    assert [len(prediction.classes) for prediction in found] == [2, 2, 2]
    assert len(next(predict(exported, names, top=50)).classes) == 3


def test_networks_for_grey_images_predict(tmp_path, gallery):
    card = make_card(load_space("fashion"), class_names=tuple("abcdefghij"))
    save_trained(tmp_path / "model.safetensors", card)
    assert len(probabilities(predict(tmp_path, [gallery]))) == 8


def test_the_weights_are_preferred_to_an_older_onnx_file(exported, gallery, tmp_path):
    home = Path(shutil.copytree(exported / "models" / "best", tmp_path / "best"))
    save_trained(home / "model.safetensors", make_card(), seed=9)
    assert list(predict(home, [gallery])) != list(predict(exported, [gallery]))
    (home / "model.safetensors").unlink()
    assert list(predict(home, [gallery])) == list(predict(exported / "model.onnx", [gallery]))


# Invalid input


def test_invalid_images_and_arguments_are_refused(exported, gallery, tmp_path):
    for name, message in (("broken.png", "cannot read"), ("notes.txt", "no image in a known format")):
        with pytest.raises(GreedyNASError, match=message) as error:
            list(predict(exported, [gallery / "colour.png", gallery / name]))
        assert str(gallery / name) in str(error.value)
    with pytest.raises(GreedyNASError, match=r"no such image: .*nowhere"):
        predict(exported, [tmp_path / "nowhere.png"])
    with pytest.raises(GreedyNASError, match="no images in"):
        predict(exported, [tmp_path])
    with pytest.raises(GreedyNASError, match="at least one image"):
        predict(exported, [])
    with pytest.raises(GreedyNASError, match="top and batch_size must be at least 1"):
        predict(exported, [gallery], top=0)


def test_every_broken_image_of_a_folder_is_reported(exported, tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_text("text")
    assert [prediction.error for prediction in predict(exported, [tmp_path])] == ["no image in a known format"] * 2


def changed(model, how):
    """Change an ONNX model in a way that must be refused."""
    graph = model.graph
    if how == "no card":
        model.ClearField("metadata_props")
    elif how == "custom operator":
        graph.node[0].domain = "com.evil"
        model.opset_import.append(onnx.helper.make_opsetid("com.evil", 1))
    elif how == "microsoft's operators":
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    elif how == "weights elsewhere":
        onnx.external_data_helper.set_external_data(graph.initializer[0], "/etc/passwd")
        graph.initializer[0].ClearField("raw_data")
        graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    elif how == "weights elsewhere in a node":
        node = onnx.helper.make_node("Constant", [], ["c"], value=onnx.numpy_helper.from_array(np.zeros(2, np.float32)))
        onnx.external_data_helper.set_external_data(node.attribute[0].t, "secret")
        node.attribute[0].t.ClearField("raw_data")
        graph.node.insert(0, node)
    elif how == "control flow":
        body = onnx.helper.make_graph([], "body", [], [])
        graph.node.append(onnx.helper.make_node("If", ["x"], ["y"], then_branch=body, else_branch=body))
    elif how == "functions":
        one = onnx.helper.make_function("local", "f", ["a"], ["b"], [], [onnx.helper.make_opsetid("", 20)])
        model.functions.append(one)
    elif how == "other classes":
        graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    elif how == "another size":
        graph.input[0].type.tensor_type.shape.dim[2].dim_value = 9
    elif how == "invalid":
        graph.node[0].input[0] = "nothing"
    elif how == "wrong card":
        card = json.loads({entry.key: entry.value for entry in model.metadata_props}[KEY])
        onnx.helper.set_model_props(model, {KEY: json.dumps({**card, "class_names": ["a"]})})
    return model


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no card", "not a greedynas model"),
        ("custom operator", "outside of the ONNX standard .com.evil"),
        ("microsoft's operators", "outside of the ONNX standard .com.microsoft"),
        ("weights elsewhere", "weights in other files"),
        ("weights elsewhere in a node", "weights in other files"),
        ("control flow", "control flow"),
        ("functions", "outside of the ONNX standard .functions"),
        ("other classes", "does not fit its card|not a valid ONNX model"),
        ("another size", "does not fit its card|not a valid ONNX model"),
        ("invalid", "not a valid ONNX model"),
        ("wrong card", "3 outputs cannot have 1 class names"),
    ],
)
def test_invalid_onnx_files_are_refused(exported, gallery, tmp_path, how, message):
    file = tmp_path / "model.onnx"
    file.write_bytes(changed(onnx.load(exported / "model.onnx"), how).SerializeToString())
    with pytest.raises(GreedyNASError, match=message) as error:
        predict(file, [gallery])
    assert "\n" not in str(error.value)


# ONNX files that need too much memory or time


def hostile(tmp_path, make, **options):
    file = tmp_path / "model.onnx"
    file.write_bytes(make(make_card().model_dump_json(exclude_none=True), **options))
    return file


@pytest.mark.parametrize("how", [*hostile_onnx.MEMORY, "twice too much"])
def test_onnx_files_cannot_take_all_memory(gallery, tmp_path, how):
    """The last file, which needs 2.4 GB, would run here without a limit."""
    make = hostile_onnx.MEMORY.get(how, lambda card: hostile_onnx.expands_the_batch(card, copies=3))
    with pytest.raises(GreedyNASError, match=r"model.onnx was stopped: .* less than 1\.3 GB of memory") as error:
        list(predict(hostile(tmp_path, make), [gallery / "colour.png"]))
    assert "\n" not in str(error.value)


def test_onnx_files_cannot_take_all_time(gallery, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "RUN_SECONDS", 1.0)
    start = time.monotonic()
    with pytest.raises(GreedyNASError, match=r"model.onnx was stopped after 1 s"):
        list(predict(hostile(tmp_path, hostile_onnx.takes_long), [gallery / "colour.png"]))
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    ("how", "message"), [("fails", "ONNX Runtime cannot run"), ("wrong-batch", "does not fit its card")]
)
def test_onnx_files_that_fail_while_running_give_an_error(gallery, tmp_path, how, message):
    with pytest.raises(GreedyNASError, match=message) as error:
        list(predict(hostile(tmp_path, hostile_onnx.FAILURES[how]), [gallery / "colour.png"]))
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="reads what Linux says about processes")
def test_the_process_of_an_onnx_file_is_limited_and_ends(exported):
    opened = sandbox.ModelProcess(exported / "model.onnx", sandbox.ONNX_RUNTIME, threads=1)
    opened.open(3, 8, 3)
    process = opened._process
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    memory, seconds = (re.search(rf"{name} +(\d+) ", limits) for name in ("Max address space", "Max cpu time"))
    assert memory is not None
    assert int(memory[1]) < 2**31
    assert seconds is not None
    assert int(seconds[1]) < 1000
    process.kill()  # as the system does when memory runs out
    with pytest.raises(GreedyNASError, match=r"model.onnx cannot be run: its process was ended by SIGKILL"):
        opened.classify(np.zeros((1, 3, 8, 8), np.float32))

    opened = sandbox.ModelProcess(exported / "model.onnx", sandbox.ONNX_RUNTIME, threads=1)
    process = opened._process
    del opened
    assert process.poll() is not None
    opened = sandbox.ModelProcess(exported / "model.onnx", sandbox.ONNX_RUNTIME, threads=1)
    opened._process.stdin.close()  # as if this process had ended
    assert opened._process.wait(10) == 0


def test_large_batches_are_run_in_parts(exported, monkeypatch):
    images = np.random.default_rng(0).random((7, 3, 8, 8), np.float32)
    logits = []
    for memory in (sandbox.BATCH_MEMORY, 3 * 8 * 8 * sandbox.PIXEL_BYTES, 1):
        monkeypatch.setattr(sandbox, "BATCH_MEMORY", memory)
        opened = sandbox.ModelProcess(exported / "model.onnx", sandbox.ONNX_RUNTIME, threads=1)
        opened.open(3, 8, 3)
        logits.append(opened.classify(images))
    assert logits[0].shape == (7, 3)
    assert np.allclose(logits[0], logits[1], atol=1e-5)
    assert np.allclose(logits[0], logits[2], atol=1e-5)


def giant(size, channels, stride=1):
    """Return the card of a network with few weights, large images and many channels."""
    stem = [Fixed(op="CONV_K3", channels=channels, stride=stride), Fixed(op="CONV_K3", channels=8, stride=8)]
    stage = Stage(channels=8, stride=8)
    space = Space(name="giant", ops=["ID", "MB1_K3"], stem=stem, stages=[stage], image_size=size, num_classes=3)
    return make_card(space, path=(1,), image_size=size)


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (giant(2048, 256), "needs 4.3 GB for its largest tensor"),
        (giant(256, 4096), "needs 1.1 GB for its largest tensor"),
        (giant(4096, 2048, stride=8), "2.1 GB for its largest tensor"),
        (make_card("vit_tiny_patch16_224", image_size=2048), "GB for its largest tensor"),
    ],
)
def test_oversized_networks_are_refused(card, message, tmp_path, gallery):
    """Without the check, a file of 100 KB needed 9 GB."""
    save_trained(tmp_path / "model.safetensors", card)
    with pytest.raises(GreedyNASError, match=message):
        predict(tmp_path / "model.safetensors", [gallery / "colour.png"])


def test_the_cost_of_a_network_is_measured_without_running_it():
    card = giant(64, 16)
    network = make_network(card).eval()
    assert measure(network, card) == (16 * 64 * 64, card.space.costs([card.path]).macs[0])


@pytest.mark.parametrize(
    "card", [giant(512, 64), giant(1024, 96, stride=2), make_card("mobilenetv3_small_050", image_size=640)]
)
def test_large_networks_within_the_limits_are_run(card, tmp_path, gallery):
    save_trained(tmp_path / "model.safetensors", card)
    assert len(list(predict(tmp_path / "model.safetensors", [gallery / "colour.png"]))) == 1


def test_files_that_are_not_models_are_refused(exported, gallery, tmp_path):
    data = (exported / "model.onnx").read_bytes()
    for content in (
        b"",
        b"text",
        b"\x80\x04.",
        b"PK\x03\x04",
        data[:1000],
        data[: len(data) // 2],
        bytes(range(256)) * 9,
    ):
        for name in ("model.onnx", "model.safetensors"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(GreedyNASError) as error:
                predict(tmp_path / name, [gallery])
            assert "\n" not in str(error.value).strip()
    with pytest.raises(GreedyNASError, match="no such model"):
        predict(tmp_path / "nowhere.onnx", [gallery])


# Output


def shown(predictions, width=80):
    console = make_console(file=io.StringIO(), width=width)
    show_predictions(predictions, console)
    return console.file.getvalue()


def test_predictions_are_shown(exported, gallery):
    text = shown(predict(exported, [gallery]))
    assert "colour.png" in text
    assert re.search(r"\d+\.\d\d% .* [abc]\n", text)
    assert re.search(r"broken\.png skipped: \S+", text)


def test_names_are_shown_literally():
    names = ("[red]alarm[/]", "<script>", "日本語", "\x1b[2Jgone", "two\nlines")
    text = shown(
        [Prediction(Path("[b].png"), tuple((name, 0.2) for name in names)), Prediction(Path("x"), error="\x1b[2J")]
    )
    for part in ("[b].png", "[red]alarm[/]", "<script>", "日本語", r"\x1b[2Jgone", r"two\nlines"):
        assert part in text
    assert "\x1b" not in text


def test_predictions_as_json(exported, gallery):
    facts = [prediction_facts(prediction) for prediction in predict(exported, [gallery], top=1)]
    assert json.loads(json.dumps(facts)) == facts
    assert facts[0] == {"file": str(gallery / "broken.png"), "classes": [], "error": facts[0]["error"]}
    assert facts[1]["error"] is None
    assert set(facts[1]["classes"][0]) == {"name", "probability"}


# The documentation


def test_the_snippet_of_the_documentation(exported, gallery, tmp_path):
    """It runs as printed in a process that cannot import greedynas."""
    (code,) = re.findall(r"```python\n(import json\n.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "runs" / "photos").mkdir(parents=True)
    shutil.copy(exported / "model.onnx", tmp_path / "runs" / "photos")
    Image.open(gallery / "turned.jpg").save(
        tmp_path / "holiday.jpg", quality="keep", exif=Image.open(gallery / "turned.jpg").getexif()
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['greedynas'] = None; sys.modules['torch'] = None\n{code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    (expected,) = predict(exported, [tmp_path / "holiday.jpg"])
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [name for _, name in lines] == [name for name, _ in expected.classes]
    assert [float(value) for value, _ in lines] == pytest.approx([value for _, value in expected.classes], abs=2e-4)


def test_loaded_networks_are_plain_modules(exported):
    network, card = load_network(exported)
    assert isinstance(network, torch.nn.Module)
    assert card.class_names == ("a", "b", "c")
