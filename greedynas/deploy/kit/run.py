"""Time the graphs of a latency kit on this device (or on an Android phone that adb reaches), and write timings.json.

    python3 run.py --threads 1                                   # on the device, with the runtime from pip
    python3 run.py --adb --binary benchmark_model --threads 4    # on the computer to which a phone is connected (LiteRT)

It needs Python 3.9, NumPy and one package: ai-edge-litert, onnxruntime or executorch. Afterwards, on any computer:

    greedynas latency import timings.json --space NAME --out phone.json
"""

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNS, WARMUP = 5, 3  # runs of a graph in each round, of which the median counts
ON_PHONE = "/data/local/tmp/greedynas-kit"


def open_litert(file, threads):
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(file), num_threads=threads)
    interpreter.allocate_tensors()
    return interpreter.invoke


def open_onnxruntime(file, threads):
    import numpy
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    found = session.get_inputs()[0]
    feed = {found.name: numpy.random.default_rng(0).standard_normal(found.shape, numpy.float32)}
    return lambda: session.run(None, feed)


def open_executorch(file, threads):
    import torch
    from executorch.extension.pybindings import portable_lib

    portable_lib._unsafe_reset_threadpool(threads)
    data = file.read_bytes()
    module = portable_lib._load_for_executorch_from_buffer(data)
    image = torch.randn(json.loads((HERE / "kit.json").read_text())["inputs"][file.name])
    return lambda data=data: module.run_method("forward", (image,))


OPEN = {"litert": open_litert, "onnxruntime": open_onnxruntime, "executorch": open_executorch}
PACKAGES = {"litert": "ai-edge-litert", "onnxruntime": "onnxruntime", "executorch": "executorch"}


def time_here(kit, threads, rounds):
    """Return the median milliseconds of each round by file; the graphs take turns."""
    runs = {graph["file"]: OPEN[kit["runtime"]](HERE / graph["file"], threads) for graph in kit["graphs"]}
    for run in runs.values():
        for _ in range(WARMUP):
            run()
    found = {file: [] for file in runs}
    for turn in range(rounds):
        for file, run in runs.items():
            times = []
            for _ in range(RUNS):
                start = time.perf_counter()
                run()
                times.append(1000 * (time.perf_counter() - start))
            found[file].append(statistics.median(times))
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    return found


def time_by_adb(kit, threads, rounds, binary):
    """Return the same for a phone, by LiteRT's benchmark_model, whose averages of a run count as a round."""
    if kit["runtime"] != "litert":
        sys.exit("--adb times LiteRT kits; on the phone itself, run this script in Termux")
    adb("shell", f"mkdir -p {ON_PHONE}")
    adb("push", str(binary), f"{ON_PHONE}/benchmark_model")
    adb("shell", f"chmod +x {ON_PHONE}/benchmark_model")
    for graph in kit["graphs"]:
        adb("push", str(HERE / graph["file"]), ON_PHONE)
    found = {graph["file"]: [] for graph in kit["graphs"]}
    for turn in range(rounds):
        for file in found:
            command = (
                f"{ON_PHONE}/benchmark_model --graph={ON_PHONE}/{file} --num_threads={threads} --num_runs={10 * RUNS}"
            )
            text = adb("shell", command)
            match = re.search(r"Inference \(avg\): ([0-9.eE+]+)", text)
            if match is None:
                sys.exit(f"benchmark_model printed no timing for {file}: {text[-200:]}")
            found[file].append(float(match[1]) / 1000)
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    return found


def adb(*arguments):
    done = subprocess.run(["adb", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"adb {arguments[0]} failed: {done.stdout.strip()[-200:]}")
    return done.stdout


def device_name(by_adb):
    if by_adb:
        return adb("shell", "getprop ro.product.model").strip()
    model = Path("/proc/device-tree/model")
    if model.is_file():
        return model.read_text().strip("\0 \n")
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def runtime_name(kit, by_adb):
    if by_adb:
        return "LiteRT benchmark_model"
    from importlib.metadata import version

    package = PACKAGES[kit["runtime"]]
    return f"{package} {version(package)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--adb", action="store_true", help="time on a connected Android phone")
    parser.add_argument("--binary", help="LiteRT's benchmark_model for the phone, with --adb")
    parser.add_argument("--out", default="timings.json")
    options = parser.parse_args()
    if options.threads < 1 or options.rounds < 1 or options.adb != bool(options.binary):
        parser.error("--threads and --rounds are at least 1, and --adb needs --binary")
    kit = json.loads((HERE / "kit.json").read_text())
    if options.adb:
        rounds = time_by_adb(kit, options.threads, options.rounds, options.binary)
    else:
        rounds = time_here(kit, options.threads, options.rounds)
    kit.pop("inputs", None)
    result = {
        "kind": "greedynas latency timings",
        "schema_version": 1,
        "device": device_name(options.adb)[:200],
        "runtime": f"{runtime_name(kit, options.adb)}, {kit['precision']}",
        "threads": options.threads,
        "kit": kit,
        "rounds_ms": rounds,
    }
    Path(options.out).write_text(json.dumps(result) + "\n")
    print(
        f"written to {options.out}; next: greedynas latency import {options.out} --space {kit['space']} --out table.json"
    )


if __name__ == "__main__":
    main()
