"""Tests of the export to formats that a plugin has registered."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from greedynas import GreedyNASError, load_network
from greedynas.deploy.formats import FORMATS
from greedynas.deploy.formats import format as format_module
from greedynas.deploy.formats.format import Conversion, Format, format_of, known_formats, make_format
from greedynas.deploy.prediction import open_model, predict
from greedynas.runtime.files import read_json, write_json
from greedynas.stages import export
from greedynas.stages.export import export_stage
from greedynas.stages.export_report import report_export
from tests.helpers.exports import QUIET, make_run
from tests.helpers.model_files import SE, make_card, save_trained
from tests.helpers.plugins import Toy, example_of, forgetting, registered

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(photos, tmp_path):
    return make_run(tmp_path / "run", photos)


@pytest.fixture
def toy():
    with registered(FORMATS, toy=Toy):
        yield


def printed(result, run):
    console = Console(file=io.StringIO(), width=140)
    report_export(result, run, console)
    return console.file.getvalue()


def test_a_format_of_a_plugin_is_exported_like_any_other(run, toy, data):
    home = run / "models" / "best"
    result = export_stage(run, QUIET, formats=["toy", "safetensors"])
    assert result == read_json(home / "export.json")
    assert (result["formats"], result["runtime"]) == (["safetensors", "toy"], "toy 0.1")
    files = {entry["file"]: entry for entry in result["files"]}
    assert [(entry["format"], name, entry["precision"]) for name, entry in files.items()] == [
        ("safetensors", "model.safetensors", "fp32"),
        ("toy", "model.toy", "fp32"),
        ("toy", "model.bf16.toy", "bf16"),
    ]
    assert files["model.toy"]["agrees"]["images"] == 42
    assert files["model.toy"]["agrees"]["max_difference"] < 1e-5
    assert "agrees" not in files["model.bf16.toy"]
    assert files["model.toy"]["top1"] == files["model.safetensors"]["top1"]
    assert files["model.toy"]["latency_ms"] > 0
    assert files["model.toy"]["bytes"] == (home / "model.toy").stat().st_size
    assert result["skipped"] == [{"file": "model.ternary.toy", "why": "three values are too few"}]
    # The file of the first precision is published, together with the card that describes its input.
    for name in ("model.toy", "model.json"):
        assert (run / name).read_bytes() == (home / name).read_bytes()
    assert not (run / "model.bf16.toy").exists()
    assert sorted(file.name for file in home.iterdir() if file.name.startswith("export")) == ["export.json"]
    assert torch.load(home / "model.bf16.toy", weights_only=True)["images"] == 42  # all that there are for calibration
    text = printed(result, run)
    assert "model.bf16.toy" in text
    assert "in Toy Runtime, undisturbed" in " ".join(text.split())
    assert "model.toy and PyTorch agree within " in text
    assert "left out: model.ternary.toy (three values are too few)" in text


def test_the_example_in_the_documentation(run, run_cli, tmp_path):
    imports = "import io\nimport torch\nfrom greedynas.runtime.files import write_atomically\n"
    (tmp_path / "plugin_of_a_format.py").write_text(example_of(format_module, imports))
    plugin = ["--plugin", tmp_path / "plugin_of_a_format.py"]
    with forgetting(FORMATS):
        code, out, err = run_cli("export", run, *plugin, "--format", "torch_export")
        assert (code, err) == (0, "")
        assert "model.pt2 and PyTorch agree within" in out
    assert [entry["file"] for entry in read_json(run / "models" / "best" / "export.json")["files"]] == ["model.pt2"]
    code, _, err = run_cli("export", run, "--format", "torch_export")
    assert (code, err.count("\n")) == (2, 1)
    assert "unknown format 'torch_export'; known: onnx, safetensors, coreml, " in err


def test_a_format_that_fails_is_one_line_and_leaves_the_others(exported, data, tmp_path):
    class Broken(Toy):
        def convert(self, source, precision, file):
            file.write_bytes(b"half")
            raise RuntimeError("no such\noperator")

    run = Path(shutil.copytree(exported, tmp_path / "run"))
    before = {
        file: file.read_bytes()
        for file in run.rglob("*")
        if file.is_file() and file.name not in ("log.txt", "data.jsonl")
    }
    with registered(FORMATS, toy=Broken):
        with pytest.raises(GreedyNASError, match=r"^best cannot be converted to toy: no such operator$"):
            export_stage(run, QUIET, formats=["toy"], data=data)
        assert "Traceback" in (run / "log.txt").read_text()  # for the author of the format
    assert not list(run.rglob("*.toy"))
    assert not list(run.rglob("*.tmp"))
    after = {
        file: file.read_bytes()
        for file in run.rglob("*")
        if file.is_file() and file.name not in ("log.txt", "data.jsonl")
    }
    assert after == before


def test_predictions_with_a_format_of_a_plugin(run, toy, photos):
    export_stage(run, QUIET, formats=["toy"])
    images = sorted(photos.rglob("*.png"))[:5]
    assert images
    expected = list(predict(run, images))
    for file in (run / "model.toy", run / "models" / "best" / "model.toy"):
        for found, wanted in zip(predict(file, images), expected, strict=True):
            assert [name for name, _ in found.classes] == [name for name, _ in wanted.classes]
            assert [p for _, p in found.classes] == pytest.approx([p for _, p in wanted.classes])
    (run / "model.json").unlink()
    with pytest.raises(GreedyNASError, match=r"has no card: model\.json should lie beside it"):
        open_model(run / "model.toy")
    other = make_card(SE.adapt(num_classes=4), class_names=tuple("abcd"))
    write_json(run / "model.json", other.model_dump(mode="json", exclude_none=True))
    classify, _ = open_model(run / "model.toy")
    with pytest.raises(GreedyNASError, match="does not fit its card: it gives no logits of 4 classes"):
        classify(torch.zeros(2, 3, 8, 8))


def test_files_that_this_machine_cannot_run_are_still_converted(run):
    class ForPhones(Toy):
        def open(self, file, threads=None):
            return None

    with registered(FORMATS, toy=ForPhones):
        result = export_stage(run, QUIET, formats=["toy"])
        assert [(entry["file"], entry["top1"], entry["latency_ms"]) for entry in result["files"]] == [
            ("model.toy", None, None),
            ("model.bf16.toy", None, None),
        ]
        assert (run / "model.toy").is_file()
        text = printed(result, run)
        assert "not run" in text
        assert "converted, not run on this machine: model.toy" in text
        with pytest.raises(GreedyNASError, match=r"this machine cannot run .*: it has no Toy Runtime"):
            open_model(run / "model.toy")


def test_a_missing_package_is_one_line(run):
    class Far(Toy):
        packages = {"json": "json", "no_such_runtime": "no-such-runtime", "no_such.part": "no-such-runtime"}  # noqa: RUF012

    with registered(FORMATS, toy=Far):
        with pytest.raises(GreedyNASError) as error:
            export_stage(run, QUIET, formats=["onnx", "toy"])
        assert str(error.value) == (
            "the format 'toy' needs no_such_runtime, no_such.part, which are not installed: pip install no-such-runtime"
        )
        (run / "model.toy").write_bytes(b"")
        with pytest.raises(GreedyNASError, match="pip install no-such-runtime"):
            open_model(run / "model.toy")
    assert not (run / "models" / "best" / "export.json").exists()


def test_unknown_names_list_all(run, toy):
    with pytest.raises(
        GreedyNASError, match=r"unknown format 'toi'.*known: onnx, safetensors, .*, toy .*--plugin MODULE"
    ):
        export_stage(run, QUIET, formats=["toi"])


def test_files_that_differ_from_pytorch_are_not_written(run, data):
    class Wrong(Toy):
        def open(self, file, threads=None):
            right = super().open(file)
            return lambda batch: right(batch) * 1.1

    with (
        registered(FORMATS, toy=Wrong),
        pytest.raises(GreedyNASError, match=r"model\.toy differs from PyTorch by .* and is not written"),
    ):
        export_stage(run, QUIET, formats=["toy"], data=data)
    assert not list(run.rglob("*.toy"))
    assert not list(run.rglob("*.tmp"))


def test_a_full_disk_leaves_nothing_out(run, data):
    """Check that an error of the machine skips no file: repeating the command makes it."""

    class Full(Toy):
        def convert(self, source, precision, file):
            if precision == "bf16":
                raise OSError(28, "No space left on device", str(file))
            super().convert(source, precision, file)

    with registered(FORMATS, toy=Full), pytest.raises(OSError, match="No space left"):
        export_stage(run, QUIET, formats=["toy"], data=data)
    assert not (run / "models" / "best" / "export.json").exists()
    assert not list(run.rglob("*.tmp"))


def test_files_in_several_parts(run, data, monkeypatch):
    class Parts(Toy):
        precisions = ("fp32",)

        def companions(self, precision):
            return ("model.toy.names",)

        def convert(self, source, precision, file):
            super().convert(source, precision, file)
            file.with_name("model.toy.names").write_text(" ".join(source.card.class_names))

    home = run / "models" / "best"
    with registered(FORMATS, toy=Parts):
        (entry,) = export_stage(run, QUIET, formats=["toy"], data=data)["files"]
        assert entry["bytes"] == (home / "model.toy").stat().st_size + len("a b c")
        assert list(entry["companions"]) == ["model.toy.names"]
        assert (run / "model.toy.names").read_text() == (home / "model.toy.names").read_text() == "a b c"
        monkeypatch.setattr(export, "write_files", lambda *_: pytest.fail("exported again"))
        export_stage(run, QUIET, formats=["toy"], data=data)
        (home / "model.toy.names").write_text("a b")
        with pytest.raises(pytest.fail.Exception, match="exported again"):
            export_stage(run, QUIET, formats=["toy"], data=data)


def test_without_its_plugin_a_file_stays(run, data, monkeypatch):
    home = run / "models" / "best"
    with registered(FORMATS, toy=Toy):
        both = export_stage(run, QUIET, formats=["safetensors", "toy"], data=data)
    with monkeypatch.context() as patch:
        patch.setattr(export, "write_files", lambda *_: pytest.fail("exported again"))
        assert export_stage(run, QUIET, formats=["safetensors"], data=data) == both
        assert "model.toy" in printed(both, run)
    # Without the plugin no format can be added, and no file is removed.
    with pytest.raises(GreedyNASError, match="unknown format 'toy'"):
        export_stage(run, QUIET, formats=["onnx"], data=data)
    assert (home / "model.toy").is_file()
    # For other weights, its file is removed.
    save_trained(home / "model.safetensors", make_card(), seed=5)
    assert export_stage(run, QUIET, formats=["safetensors"], data=data)["formats"] == ["safetensors"]
    assert not (home / "model.toy").exists()
    assert not (home / "model.bf16.toy").exists()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"name": "other"}, "registered as 'toy' calls itself 'other'"),
        ({"suffix": "/../../x"}, r"cannot write 'model/\.\./\.\./x': use a name like model\.onnx"),
        ({"suffix": ".json"}, r"cannot write 'model\.json'"),
        ({"suffix": ".onnx", "precisions": ("fp32", "int8")}, r"'onnx' and 'toy' both write model\.onnx"),
    ],
)
def test_forbidden_names_are_refused(run, named, message):
    with (
        registered(FORMATS, toy=type("Named", (Toy,), named)),
        pytest.raises(GreedyNASError, match=message),
    ):
        export_stage(run, QUIET, formats=["onnx", "toy"])


def test_records_of_older_versions_have_no_formats(exported, tmp_path, monkeypatch):
    run = Path(shutil.copytree(exported, tmp_path / "run"))
    file = run / "models" / "best" / "export.json"
    record = read_json(file)
    for entry in record["files"]:
        assert entry.pop("format") == ("safetensors" if entry["file"] == "model.safetensors" else "onnx")
    write_json(file, record)
    monkeypatch.setattr(export, "write_files", lambda *_: pytest.fail("exported again"))
    assert export_stage(run, QUIET) == record
    assert "in ONNX Runtime, undisturbed" in " ".join(printed(record, run).split())


def test_forged_records_are_not_trusted(exported, tmp_path, monkeypatch):
    run = Path(shutil.copytree(exported, tmp_path / "run"))
    file = run / "models" / "best" / "export.json"
    record = read_json(file)

    def again(*_):
        raise InterruptedError

    monkeypatch.setattr(export, "write_files", again)
    entry = record["files"][0]
    for forged in (
        {**record, "formats": "onnx"},
        {**record, "formats": [["onnx"]]},
        {**record, "files": [{**entry, "file": "../../config.yaml"}]},
        {**record, "files": [{**entry, "file": "../../config.yaml", "format": "zzz"}]},
        {**record, "files": [{**entry, "companions": {"../../config.yaml": "0"}}]},
    ):
        write_json(file, forged)
        with pytest.raises(InterruptedError):
            export_stage(run, QUIET)
        assert (run / "config.yaml").is_file()
        shutil.copytree(exported, run, dirs_exist_ok=True)


def test_formats_by_suffix(tmp_path):
    assert [format.name for format in known_formats()][:2] == ["onnx", "safetensors"]
    assert format_of(Path("x/model.int8.ONNX")).name == "onnx"
    assert format_of(Path("weights.safetensors")).name == "safetensors"
    assert format_of(Path("model.pt")) is None
    for name in ("onnx", "safetensors"):
        format = make_format(name)
        assert isinstance(format, Format)
        assert format.reference == "fp32"
        assert json.dumps(format.runtime())


def test_what_a_built_in_format_writes_can_be_opened(exported, data, tmp_path):
    """Check reading the file as a library, without a run."""
    network, card = load_network(exported)
    batch = data.train.eval_batch()[0].contiguous()
    source = Conversion(network, card, lambda: iter([batch]))
    for name in ("onnx", "safetensors"):
        format = make_format(name)
        for precision in format.precisions:
            file = tmp_path / format.file_name(precision)
            format.convert(source, precision, file)
            logits = format.open(file, threads=1)(batch)
            assert logits.shape == (len(batch), 3)
            if precision == "fp32":
                with torch.no_grad():
                    assert torch.allclose(logits, network(batch), atol=1e-4)
            loaded, found = format.load(file)
            assert found == card
            assert torch.allclose(loaded(batch), logits, atol=1e-4)
            runner = format.runner(file, batch[:1], 1)
            assert runner is None if name == "safetensors" else runner() > 0


def test_short_latencies_are_microseconds(run):
    entry = {"file": "model.onnx", "precision": "fp32", "bytes": 140_000, "top1": 0.5, "latency_ms": 0.0202}
    timed = {**entry, "latency_median_ms": 0.0203, "latency_iqr_ms": 0.0003}
    slow = {**entry, "file": "slow.onnx", "latency_ms": 1.5, "latency_median_ms": 1.52, "latency_iqr_ms": 0.01}
    text = printed({"model": "best", "files": [timed, slow], "images": 10, "machine": "a CPU", "skipped": []}, run)
    assert "20.2 µs" in text
    assert "20.3 ± 0.3 µs" in text
    assert "1.52 ± 0.01 ms" in text
