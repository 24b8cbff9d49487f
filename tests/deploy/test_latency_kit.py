"""The latency kit: its script runs here, where ONNX Runtime is installed, and a false adb stands for a phone."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from greedynas import Fixed, GreedyNASError, Space, Stage, import_latency
from greedynas.deploy.latency_kit import write_kit

pytestmark = pytest.mark.usefixtures("one_thread")

SPACE = Space(
    name="kit-space",
    ops=["ID", "MB3_K3"],
    stem=[Fixed(op="CONV_K3", channels=8, stride=2)],
    stages=[Stage(channels=8, repeat=2, stride=2)],
    image_size=16,
    num_classes=3,
)


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits") / "kit"
    write_kit(SPACE, "onnxruntime", folder)
    return folder


@pytest.fixture(scope="module")
def timings(kit):
    command = [sys.executable, "run.py", "--rounds", "3", "--threads", "1"]
    subprocess.run(command, cwd=kit, check=True, capture_output=True)
    return kit / "timings.json"


def test_timings_of_the_script_become_a_table(timings):
    table = import_latency(timings, SPACE)
    assert table.missing() == []
    assert table.backend.startswith("onnxruntime ")
    assert table.backend.endswith(", fp32")
    assert (table.threads, table.fit.networks) == (1, 8)
    written = json.loads(timings.read_text())
    graph = next(
        one
        for one in written["kit"]["graphs"]
        if one["block"] and one["block"]["op"] == "MB3_K3" and one["copies"] == 4
    )
    alone = next(one for one in written["kit"]["graphs"] if one["block"] == graph["block"] and one["copies"] == 1)
    fastest = [min(written["rounds_ms"][one["file"]]) for one in (graph, alone)]
    layer = next(
        row
        for row in table.layers
        if row.in_channels == graph["block"]["in_channels"] and row.stride == graph["block"]["stride"]
    )
    assert layer.ops["MB3_K3"].ms == pytest.approx(max(fastest[0] - fastest[1], 0) / 3)
    assert table.price((1, 1), SPACE) == pytest.approx(table.cost_table(SPACE)(np.array([[1, 1]]))[0])


def test_a_phone_is_timed_through_adb(kit, tmp_path):
    """A false adb records what it is asked for and prints what benchmark_model prints on a phone."""
    adb = tmp_path / "adb"
    adb.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "open(os.environ['ADB_LOG'], 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "if 'getprop' in sys.argv[-1]: print('Phone 7')\n"
        "if '--graph' in sys.argv[-1]:\n"
        "    print('INFO: Inference timings in us: Init: 5685, First inference: 18535, Warmup (avg): 14462.3, Inference (avg): 1250.5')\n"
    )
    adb.chmod(0o755)
    made = json.loads((kit / "kit.json").read_text())
    folder = tmp_path / "kit"
    folder.mkdir()
    (folder / "run.py").write_bytes((kit / "run.py").read_bytes())
    (folder / "kit.json").write_text(json.dumps({**made, "runtime": "litert"}))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ADB_LOG": str(tmp_path / "log")}
    command = [sys.executable, "run.py", "--adb", "--binary", "bench", "--threads", "4", "--rounds", "2"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment)
    table = import_latency(folder / "timings.json", SPACE)
    assert (table.device, table.threads) == ("Phone 7", 4)
    assert table.constant_ms == pytest.approx(1.2505)  # all graphs take the same time, so blocks add nothing
    asked = (tmp_path / "log").read_text()
    assert "push bench " in asked
    assert "--num_threads=4" in asked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "has no timings of a kit: schema_version"),
        ({"rounds_ms": {}}, "lacks the timings of"),
        ({"rounds_ms": {"0000.onnx": [float("nan")]}}, "has no timings of a kit"),
        ({"threads": 0}, "has no timings of a kit: threads"),
    ],
)
def test_damaged_timings_are_one_line(timings, tmp_path, change, message):
    file = tmp_path / "timings.json"
    file.write_text(json.dumps({**json.loads(timings.read_text()), **change}))
    with pytest.raises(GreedyNASError, match=message) as error:
        import_latency(file, SPACE)
    assert "\n" not in str(error.value)


def test_timings_of_another_space_are_refused(timings):
    with pytest.raises(GreedyNASError, match=r"kit-space at 16 px .* lacks .* blocks of|outside|path"):
        import_latency(timings, SPACE.adapt(image_size=32))


def test_kits_that_cannot_be_written(kit, tmp_path):
    with pytest.raises(GreedyNASError, match="exists already"):
        write_kit(SPACE, "onnxruntime", kit)
    with pytest.raises(GreedyNASError, match="there are kits for litert, onnxruntime, executorch, not for 'torch'"):
        write_kit(SPACE, "torch", tmp_path / "new")
