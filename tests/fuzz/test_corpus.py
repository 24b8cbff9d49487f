"""Untrusted malformed input: no traceback, no hang, nothing executed, no file written outside the run directory."""

import contextlib
import json
import os
import pickle
import shutil
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from greedynas import GreedyNASError, Space, load_space
from greedynas.deploy.latency_import import import_latency
from greedynas.greedy.state import TrainState
from greedynas.models.model_file import KEY, load_network, parse_card, save_network
from greedynas.rundir.checkpoints import checkpoint_errors, read_checkpoint
from greedynas.rundir.schemas import Arch, Finished, Search, Top, read_record
from greedynas.runtime.files import MAX_JSON, read_json
from greedynas.runtime.yaml_files import parse_yaml
from greedynas.settings.loading import parse_assignments, validated
from greedynas.spaces.budget import parse_count, parse_latency, short_count
from greedynas.spaces.latency import LatencyTable, load_latency_table
from greedynas.spaces.paths import parse_path
from greedynas.spaces.space import MAX_LAYERS, MAX_PARAMS, Fixed, Stage
from greedynas.stages.run import Run
from tests.fuzz.kinds import CORPUS, MODEL, NAME, _lay_checkpoint, cases, lay, make_run

pytestmark = pytest.mark.usefixtures("one_thread")

HANGS = 30  # seconds


@pytest.fixture(scope="module")
def base(photos, tmp_path_factory):
    """Make a finished run on the command line."""
    from tests.fuzz.make_corpus import call

    def run_cli(*command):
        code, told = call([str(part) for part in command])
        return code, "", told

    return make_run(tmp_path_factory.mktemp("fuzz"), photos, run_cli)


def content(folder):
    """Return the files outside `run`, by name and time of the last change."""
    return {
        str(file): file.stat().st_mtime_ns for file in folder.rglob("*") if "run" not in file.relative_to(folder).parts
    }


@pytest.fixture
def alarm():
    """Let a test that hangs fail instead."""

    def too_long(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, too_long)
    yield signal.alarm
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_the_corpus_is_large():
    assert len(list(cases())) >= 200
    assert len({name.split("/")[0] for name, *_ in cases()}) >= 20


@pytest.mark.parametrize("kind", sorted({"/".join(name.split("/")[:-1]) for name, *_ in cases()}))
def test_malformed_input_is_one_line(kind, base, photos, run_cli, tmp_path, monkeypatch, alarm):
    """Check that each command that reads the input says what is wrong and exits with code 2."""
    monkeypatch.chdir(tmp_path)
    image = next(photos.rglob("*.png"))
    outside = content(tmp_path)
    for name, how, file, word in cases():
        if not name.startswith(f"{kind}/") or "/new-" in name:  # `make fuzz` repeats the new ones
            continue
        run = shutil.copytree(base, tmp_path / "run")
        data = b"" if file is None else file.read_bytes()
        alarm(HANGS)
        code, _, told = run_cli(*lay(how, data, file, run, image, word))
        alarm(0)
        lines = told.splitlines()
        found = name.rpartition("/")[2].startswith("found-")
        assert code == 2 or (code == 0 and found), (name, told)
        assert code == 0 or lines.pop().startswith("error: "), (name, told)
        assert all(line.startswith("warning: ") for line in lines), (name, told)
        assert all(line.isprintable() for line in told.splitlines()), (name, told)
        assert content(tmp_path) == outside, name  # unpickling would make a file here
        shutil.rmtree(run)


# Names and links that lead out of the run directory


@pytest.mark.parametrize(
    "place", ["log.txt", ".lock", "metrics.jsonl", "supernet", "models", "config.yaml.tmp", "report.html.tmp"]
)
@pytest.mark.parametrize("command", ["train", "search", "retrain", "export", "report"])
def test_links_out_of_a_run_are_refused(base, place, command, run_cli, tmp_path):
    run, secret = shutil.copytree(base, tmp_path / "run"), tmp_path / "secret"
    secret.mkdir() if place in ("supernet", "models") else secret.write_text("precious")
    if (run / place).is_dir():
        shutil.rmtree(run / place)
    (run / place).unlink(missing_ok=True)
    (run / place).symlink_to(secret)
    more = {"train": [base.parent / "tiny.yaml", "--out", run], "search": [run, "--flops", "50K"]}
    code, _, told = run_cli(command, *more.get(command, [run]))
    assert (code, told.count("\n")) == (2, 1), told
    assert "is a link out of the run directory" in told
    assert not any(secret.iterdir()) if secret.is_dir() else secret.read_text() == "precious"


def test_pipes_are_refused_and_links_within_a_run_are_not(base, run_cli, tmp_path, alarm):
    run = shutil.copytree(base, tmp_path / "run")
    (run / "notes").symlink_to(run / "log.txt")
    alarm(HANGS)
    with Run.open(run):
        pass
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    code, _, told = run_cli("search", run, "--flops", "50K")
    assert code == 2
    assert "is neither a file nor a folder" in told
    os.mkfifo(tmp_path / "x.png")
    code, _, told = run_cli("predict", run / MODEL, tmp_path / "x.png")
    assert code == 2
    assert "it is not a regular file" in told


def test_an_untrusted_export_record_is_not_followed(base, run_cli, tmp_path, alarm):
    """Name other files in the record, even an endless one."""
    run = shutil.copytree(base, tmp_path / "run")
    home = (run / MODEL).parent
    import hashlib

    weights = hashlib.sha256((run / MODEL).read_bytes()).hexdigest()
    about = {"schema_version": 1, "weights": weights, "formats": ["safetensors"], "skipped": []}
    alarm(HANGS)
    for files, formats in (([{"file": "/dev/zero", "sha256": "0"}], ["safetensors"]), ([], ["../up"])):
        (home / "export.json").write_text(json.dumps({**about, "files": files, "formats": formats}))
        code, _, told = run_cli("export", run, "--format", "safetensors")
        assert code == 0, told
        assert [entry["file"] for entry in json.loads((home / "export.json").read_text())["files"]] == [
            "model.safetensors"
        ]


# Names with an effect on the terminal

HOSTILE = "\x1b[2J\x1b]0;title\x07[/x][bold]\r\nerror: forged\u202e\x9b31m\u2028"


def words(value, path=()):
    """Yield the places of all strings in a nested value."""
    if isinstance(value, str):
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if not isinstance(key, int) or key == 0:
            yield from words(inner, (*path, key))


def with_word(value, path, word):
    value = json.loads(json.dumps(value))
    place = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = word
    return value


def assert_clean(told, what):
    assert all(line.isprintable() for line in told.split("\n")), (what, told)
    assert "\nerror: forged" not in told, (what, told)
    assert "Traceback" not in told, (what, told)


@pytest.mark.parametrize(
    ("place", "command"),
    [
        (f"searches/{NAME}/search.json", ("report", "{run}")),
        (f"searches/{NAME}/search.json", ("search", "{run}", "--flops", "60K")),
        (f"models/{NAME}/arch.json", ("report", "{run}")),
        (f"models/{NAME}/test.json", ("retrain", "{run}")),
        (f"models/{NAME}/retrain.json", ("retrain", "{run}")),
        ("data.jsonl", ("search", "{run}", "--flops", "50K")),
    ],
)
def test_words_in_files_have_no_effect_on_the_terminal(base, run_cli, tmp_path, place, command):
    lines = (base / place).read_text().splitlines() if place.endswith("jsonl") else [(base / place).read_text()]
    whole = {f"line {i}": json.loads(line) for i, line in enumerate(lines[:3])}  # only the first lines
    for path in words(whole):
        run = shutil.copytree(base, tmp_path / "run")
        hostile = [json.dumps(part) for part in with_word(whole, path, HOSTILE).values()]
        (run / place).write_text("\n".join([*hostile, *lines[3:]]))
        code, out, told = run_cli(*(part.replace("{run}", str(run)) for part in command))
        assert code in (0, 2), (path, told)
        assert_clean(out + told, path)
        assert_clean((run / "log.txt").read_text(), path)
        shutil.rmtree(run)


def test_the_words_of_a_checkpoint_have_no_effect_on_the_terminal(base, run_cli, tmp_path):
    """Use markup in the reason why training stopped, which is printed and was once interpreted by rich."""
    run = shutil.copytree(base, tmp_path / "run")
    state = read_checkpoint(next((run / "supernet").glob("step-*")))[1]
    _lay_checkpoint(run / "supernet", json.dumps({**state, "stopped": HOSTILE}).encode(), run)
    code, out, told = run_cli("train", base.parent / "tiny.yaml", "--out", run)
    assert code == 0, told
    assert r"(\x1b[2J\x1b]0;title\x07[/x][bold]\r\nerror: forged\u202e\x9b31m\u2028)" in out
    assert_clean(out + told, "stopped")
    assert_clean((run / "log.txt").read_text(), "stopped")


def test_names_of_files_and_classes_have_no_effect_on_the_terminal(base, photos, run_cli, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    image = shutil.copy(next(photos.rglob("*.png")), images / f"{HOSTILE}.png".replace("/", "_"))
    (images / "\x1b[2Jbroken\n.png").write_text("no image")
    (images / os.fsdecode(b"\xff.png")).write_text("no image")
    for command in (
        ["predict", base, images],
        ["predict", base, images / "\x1b[2Jbroken\n.png"],
        ["predict", base / HOSTILE, image],
        ["describe", "--space", HOSTILE],
        ["train", "fashion", "--plan", "--set", f"name={json.dumps(HOSTILE)}"],
        ["train", "fashion", "--plan", "--set", f"x={HOSTILE}"],
        ["train", "fashion", f"--{HOSTILE}"],
        [HOSTILE],
    ):
        code, out, told = run_cli(*command)
        assert code in (0, 2)
        assert_clean(out + told, command)
    network, card = load_network(base)
    hostile = card.model_copy(update={"class_names": (HOSTILE, "\x1b[2J", "\n")})
    save_network(tmp_path / "model.safetensors", network, hostile)
    code, out, told = run_cli("predict", tmp_path / "model.safetensors", image)
    assert code == 0, told
    assert_clean(out + told, "class names")
    found = json.loads(run_cli("predict", tmp_path / "model.safetensors", image, "--json")[1])
    assert {entry["name"] for entry in found["predictions"][0]["classes"]} == set(hostile.class_names)


# Limits


def test_spaces_have_limits():
    stem = [Fixed(op="CONV_K3", channels=8)]
    with pytest.raises(ValueError, match=f"more than {MAX_LAYERS} layers"):
        Space(name="long", ops=["ID"], stem=stem, stages=[Stage(channels=8, repeat=64)] * 5)
    with pytest.raises(ValueError, match=f"more than {MAX_PARAMS:,} parameters"):
        Space(name="wide", ops=["MB16_K3"], stem=stem, stages=[Stage(channels=8192, repeat=2)])
    deepest = Space(name="deep", ops=["ID", "MB1_K3"], stem=stem, stages=[Stage(channels=8, repeat=64)] * 4)
    from greedynas.spaces.paths import canonical

    assert sum(canonical([0, 1] * 128, deepest)) == 128


def test_a_json_file_that_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "arch.json"
    with file.open("wb") as handle:
        handle.truncate(MAX_JSON + 1)
    with pytest.raises(GreedyNASError, match="it is larger than"):
        read_json(file)


@pytest.mark.parametrize(
    "place",
    [
        "metrics.jsonl",
        "supernet/pool.json",
        "arch.json",
        f"searches/{NAME}/search.json",
        *(f"models/{NAME}/{name}" for name in ("arch.json", "test.json", "export.json", "top.json", "metrics.jsonl")),
    ],
)
def test_the_report_does_not_read_files_that_are_too_large(base, run_cli, tmp_path, place):
    run = shutil.copytree(base, tmp_path / "run")
    with (run / place).open("wb") as handle:
        handle.truncate(MAX_JSON + 1)
    code, _, told = run_cli("report", run)
    assert (code, told.count("\n")) == (2, 1), told
    assert f"{run / place} cannot be read: it is larger than 100,000,000 bytes" in told


def test_forged_weights_take_no_more_memory_than_their_file(base, tmp_path):
    """Load a file of a kilobyte whose card describes gigabytes."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for file in sorted((CORPUS / "model").glob("*.safetensors")):
        with contextlib.suppress(GreedyNASError):  # `predict` refuses all of them; some can be loaded, but not run
            load_network(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


def test_a_pickle_is_refused_and_not_run(tmp_path, monkeypatch, base, run_cli, photos):
    monkeypatch.chdir(tmp_path)

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    image = next(photos.rglob("*.png"))
    torch.save({"weight": Bomb()}, tmp_path / "model.safetensors")
    (tmp_path / "model.onnx").write_bytes(pickle.dumps(Bomb()))
    run = shutil.copytree(base, tmp_path / "run")
    checkpoint = next((run / "supernet").glob("step-*.safetensors"))
    shutil.copy(tmp_path / "model.safetensors", checkpoint)
    weights = ["--arch", "timm:resnet10t", "--pretrained", tmp_path / "model.safetensors"]
    for command in (["predict", tmp_path / "model.safetensors", image], ["predict", tmp_path / "model.onnx", image],
                    ["search", run, "--flops", "50K"], ["retrain", run, *weights]):  # fmt: skip
        code, _, told = run_cli(*command)
        assert code == 2, told
    assert not (tmp_path / "exploded").exists()
    assert "is a pickle, which can execute code" in run_cli("predict", tmp_path / "model.safetensors", image)[2]


# Parsers, with inputs from hypothesis

text = st.text(max_size=60)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=12
)


def only_refused(work, *arguments):
    """Check that a function returns or raises a one-line error."""
    try:
        return work(*arguments)
    except GreedyNASError:
        return None


@given(st.text(alphabet="0123456789.,_eEKMGms-+ x\u0663", max_size=12) | text)
def test_budgets(word):
    for parse in (parse_count, parse_latency):
        found = only_refused(parse, word)
        assert found is None or 0 < found < 2**62 or found == 0
    if (count := only_refused(parse_count, word)) is not None and count > 0:
        assert parse_count(short_count(count)) == pytest.approx(count, rel=1e-5)


@given(text | values)
def test_paths(word):
    space = load_space("macro")
    found = only_refused(parse_path, word, space)
    assert found is None or (len(found) == 8 and all(0 <= op < 3 for op in found))


@given(text)
def test_yaml_and_assignments(word):
    only_refused(parse_yaml, word, Path("x.yaml"), "config file")
    only_refused(parse_assignments, [word, f"lr={word}"])


MACRO = load_space("macro").model_dump(mode="json")


@st.composite
def changed(draw, whole):
    """Draw a valid value with one place changed."""
    value = json.loads(json.dumps(whole))
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key] or draw(st.booleans()):
            place[key] = draw(values)
            return value
        place = place[key]


@given(changed(MACRO))
def test_spaces(value):
    found = only_refused(validated, {"name": "x", "space": value}, "x.yaml")
    assert found is None or found.space.size >= 1


@given(changed({"name": "x", "space": MACRO, "train": {"lr": 0.1, "m": 5, "k": 2}, "data": {"source": "fashion"}}))
def test_configs(value):
    only_refused(validated, value, "x.yaml")


@given(st.dictionaries(st.sampled_from(["Conv-input:32x32x3-output:32x32x32", "x"]) | text, values, max_size=3))
def test_timings(value):
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"timings-{os.getpid()}.yaml"
    try:
        file.write_text(yaml.safe_dump(value), encoding="utf-8")
        only_refused(import_latency, file, load_space("macro"))
        file.write_text(json.dumps(value), encoding="utf-8")
        found = only_refused(load_latency_table, file)
        assert found is None or isinstance(found, LatencyTable)
    finally:
        file.unlink(missing_ok=True)


CARD = {"name": "x", "timm": "resnet18", "class_names": ["a", "b"], "image_size": 32, "image_channels": 3,
        "crop_fraction": 1.0, "mean": [0.5] * 3, "std": [0.5] * 3}  # fmt: skip


@given(changed(CARD) | values)
def test_cards(value):
    only_refused(parse_card, json.dumps(value), Path("x.safetensors"))
    only_refused(parse_card, str(value), Path("x.safetensors"))


STATE = TrainState.__dataclass_fields__
SAVED = {"pool": {"size": 2, "updates": 1, "entries": [[[0, 1], 0.5, 1]]}, "step": 1, "epoch": 0, "draws": 1, "waiting": [[[0, 1]]],
         "previous_pool": [], "novelty": None, "accuracy": 0.5, "accuracy_of": "best path", "optimization_images": 5, "evaluation_images": 5, "stopped": None, "recent_losses": [1.0],
         "metrics_length": 0, "seconds": 0.0, "measured_ratio": None, "memory": {"draws": 1}}  # fmt: skip


TWO_LAYERS = Space(
    name="x", ops=["ID", "MB3_K3"], stem=[Fixed(op="CONV_K3", channels=8)], stages=[Stage(channels=8, repeat=2)]
)


def test_the_state_of_a_checkpoint_is_fully_validated():
    assert SAVED.keys() == STATE.keys()
    assert TrainState.from_json(json.loads(json.dumps(SAVED)), TWO_LAYERS).to_json()["step"] == 1


@given(changed(SAVED) | values)
def test_states(value):
    def restore():
        with checkpoint_errors(Path("run")):
            return TrainState.from_json(value, TWO_LAYERS)

    found = only_refused(restore)
    assert found is None or found.step >= 0


@given(values, st.sampled_from([Arch, Search, Finished, Top]))
def test_records(value, kind):
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"record-{os.getpid()}.json"
    try:
        file.write_text(json.dumps(value), encoding="utf-8")
        only_refused(read_record, file, kind)
    finally:
        file.unlink(missing_ok=True)


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_headers_of_weights(tmp_path_factory, data, length):
    file = tmp_path_factory.getbasetemp() / "forged.safetensors"
    for forged in (data, struct.pack("<Q", length) + data, save({"a": torch.zeros(2)}, {KEY: data.decode("latin-1")})):
        file.write_bytes(forged)
        only_refused(load_network, file)


def test_a_checkpoint_with_false_contents_counts_as_damaged(tmp_path):
    import hashlib

    for content_ in (
        b"",
        b"\0" * 100,
        struct.pack("<Q", 2**62) + b"{}",
        save({"a": torch.zeros(2)}, {"state": "[" * 5000}),
    ):
        digest = hashlib.sha256(content_).hexdigest()[:16]
        file = tmp_path / f"step-000000001-{digest}.safetensors"
        file.write_bytes(content_)
        with pytest.raises(Exception):  # noqa: B017, PT011 (`load` skips the file whatever the error is)
            read_checkpoint(file)
        from greedynas.rundir.checkpoints import Checkpoints

        assert Checkpoints(tmp_path).load() is None
        file.unlink()


def test_unknown_latencies_are_null(base, run_cli, tmp_path):
    """Check that there is no NaN, which JSON does not have and other programs could not read."""
    run = shutil.copytree(base, tmp_path / "run")
    from tests.helpers.latency import made_up
    from tests.helpers.training import tiny_space

    table = made_up(tiny_space(repeat=1)).model_dump(mode="json")
    table["layers"][0]["ops"] = {
        op: None if i else entry for i, (op, entry) in enumerate(table["layers"][0]["ops"].items())
    }
    (tmp_path / "table.json").write_text(json.dumps(table))
    code, _, told = run_cli("search", run, "--flops", "50K", "--latency-table", tmp_path / "table.json")
    assert code == 0, told
    raw = (run / "searches" / "macs-50K" / "search.json").read_text()
    found = json.loads(raw, parse_constant=lambda word: pytest.fail(f"{word} in search.json"))["found"]
    assert any(entry["latency_ms"] is None for entry in found)
    assert np.isfinite([entry["latency_ms"] for entry in found if entry["latency_ms"] is not None]).all()
