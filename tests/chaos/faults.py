"""The faults: each function injects one kind of fault in the given number of trials and returns the number of trials.

A trial that loses something raises. If this machine cannot stage a fault (such as a full disk without permission to
mount one), a system call is made to fail instead.
"""

import errno
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.chaos.workshop import Process, Workshop, begun, differences, reached, refused, until
from tests.helpers.kill_points import Handle as _Handle
from tests.helpers.pictures import paint, picture

STAGES = ("train", "search", "retrain", "export", "run")
ROOT = Path(__file__).parents[2]


# Processes that end


def kill(shop: Workshop, trials: int, rng: random.Random, stages: tuple[str, ...] = STAGES) -> int:
    """Send kill -9 at random moments of every stage, in some trials twice in a row."""
    for trial in range(trials):
        stage = stages[trial % len(stages)]
        run = shop.before(stage)
        for _ in range(1 + trial % 2):
            killed(shop, stage, run, rng)
        shop.goes_on(stage, run)
        shutil.rmtree(run)
    return trials


def killed(shop: Workshop, stage: str, run: Path, rng: random.Random) -> None:
    """Kill a stage once at a random moment; if that was too late, try again earlier."""
    length = shop.finished(stage)[1]
    while True:
        process = shop.start(shop.command(stage, run))
        pause(process, rng.uniform(0, length))
        process.kill()
        if process.wait()[0] == -signal.SIGKILL:
            return
        shutil.rmtree(run)
        shutil.copytree(shop.before(stage), run, dirs_exist_ok=True) if stage not in ("train", "run") else None
        length /= 2


def pause(process: Process, seconds: float) -> None:
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() > end, process)


def terminate(shop: Workshop, trials: int, rng: random.Random, stages: tuple[str, ...] = STAGES) -> int:
    """Send SIGTERM (every third time Ctrl-C) at random moments; expect a message, exit code 143 (130) and no loss."""
    for trial in range(trials):
        stage = stages[trial % len(stages)]
        number = signal.SIGINT if trial % 3 == 2 else signal.SIGTERM
        run, length = shop.before(stage), shop.finished(stage)[1]
        process = shop.start(shop.command(stage, run))
        until(process.listens, process)
        pause(process, rng.uniform(0.2, 0.9) * length)
        if process.listens():
            os.killpg(process.pid, number)  # also to the workers, like a scheduler
        code, told = process.wait()
        if code != 0:  # the stage had not already finished
            assert code == 128 + number, (code, told)
            assert f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}; " in told, told
            assert "Traceback" not in told, told
        shop.goes_on(stage, run)
        shutil.rmtree(run)
    return trials


def terminate_training(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Send SIGTERM in the middle of a training; expect a checkpoint of the step it has reached."""
    config = shop.write_config("rare.yaml", checkpoint_steps=10**6, max_epochs=40)
    whole = shop.new()
    assert shop.call(shop.command("train", whole, config))[0] == 0
    for _ in range(trials):
        run = shop.new()
        process = shop.start(shop.command("train", run, config))
        until(lambda: begun(run / "metrics.jsonl"), process)  # noqa: B023
        process.kill(signal.SIGTERM)
        code, told = process.wait()
        assert code == 143, (code, told)
        (file,) = (run / "supernet").glob("step-*.safetensors")
        assert f"a checkpoint of step {int(file.name.split('-')[1])} is written" in told, told
        shop.goes_on("train", run, config, whole)
    return trials


# The disk


class Quota:
    """Lets writes fail with ENOSPC after a number of bytes; the failing write is done in part."""

    def __init__(self, left: int):
        self.left = left

    def __call__(self) -> None:
        opened = pathlib.Path.open

        def watched(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
            handle = opened(path, mode, *rest, **named)
            return self.around(handle) if set(mode) & set("wax+") and "b" in mode else handle

        pathlib.Path.open = watched  # type: ignore[method-assign, assignment]

    def around(self, handle: Any) -> Any:
        write = handle.write

        def limited(data: bytes) -> int:
            if len(data) > self.left:
                write(data[: self.left // 2])
                handle.flush()
                self.left = 0
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.left -= len(data)
            return write(data)

        full = _Handle.__new__(_Handle)  # delegates everything else
        full.handle, full.write = handle, limited
        return full


def full_disk_injected(shop: Workshop, trials: int, rng: random.Random, stages: tuple[str, ...] = STAGES[:4]) -> int:
    """Raise ENOSPC at a random byte of a stage's output."""
    for trial in range(trials):
        stage = stages[trial % len(stages)]
        run = shop.before(stage)
        ended = shop.call(shop.command(stage, run), Quota(rng.randrange(50, written_by(shop, stage))))
        refused(ended, "No space left on device")
        shop.goes_on(stage, run)
    return trials


def written_by(shop: Workshop, stage: str) -> int:
    """Return roughly how many bytes a stage adds to the run, which are fewer than it writes."""
    old = shop.before(stage)
    new = shop.finished(stage)[0]
    size = sum(file.stat().st_size for file in new.rglob("*") if file.is_file())
    return size - sum(file.stat().st_size for file in old.rglob("*") if file.is_file())


def largest_file(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Set a system limit on file sizes below the size of a checkpoint."""
    for stage in ("train", "retrain")[:trials]:
        run = shop.before(stage)
        # Python ignores SIGXFSZ: the write fails with EFBIG.
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        refused(shop.call(shop.command(stage, run), limit), "File too large")
        shop.goes_on(stage, run)
    return trials


def full_disk(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Use a file system of 2 MB that is full except for a random rest."""
    for trial in range(trials):
        stage = ("train", "retrain")[trial % 2]
        disk = shop.new("disk")
        disk.mkdir()
        with mounted(disk, "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
            run = disk / "run"
            if stage == "retrain":
                shutil.copytree(shop.before(stage), run)
            free = shutil.disk_usage(disk).free
            (disk / "other").write_bytes(b"\1" * (free - rng.randrange(10_000, 90_000)))
            refused(shop.call(shop.command(stage, run)), "No space left on device")
            (disk / "other").unlink()
            shop.goes_on(stage, run)
    return trials


def read_only(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Make the run directory read-only; each stage must say so."""
    for stage in STAGES[:trials]:
        run = shop.before(stage)
        run.mkdir(exist_ok=True)
        with mounted(run, "--bind", str(run)):
            subprocess.run(["mount", "-o", "remount,bind,ro", run], check=True)
            refused(shop.call(shop.command(stage, run)), str(run), "Read-only file system")
        shop.goes_on(stage, run)
    return trials


class CannotStage(Exception):
    """Raised if this machine does not allow to stage a fault."""


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise CannotStage(done.stderr.strip())
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def damage(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Truncate the newest checkpoint or all of them, or flip a bit."""
    for trial in range(trials):
        stage = ("train", "retrain")[trial % 2]
        run = shop.before(stage)
        folder = run / "supernet" if stage == "train" else run / "models" / "macs-60K" / "checkpoints"
        process = shop.start(shop.command(stage, run))
        until(lambda: len(list(folder.glob("step-*.safetensors"))) > 1, process)  # noqa: B023
        process.kill()
        process.wait()
        files = sorted(folder.glob("step-*.safetensors"), reverse=True)
        for file in files if trial % 4 > 1 else files[:1]:
            content = bytearray(file.read_bytes())
            if rng.random() < 0.5:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            else:
                del content[rng.randrange(len(content)) :]
            file.write_bytes(content)
        code, told = shop.call(shop.command(stage, run))
        assert code == 0, told
        assert "is damaged" in told, told
        shop.goes_on(stage, run)
    return trials


# What a run depends on


def lost_image(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Delete a file of a streaming data set during training, and restore it."""
    config = shop.write_config("streaming.yaml", {"memory_gb": 0, "workers": 1}, max_epochs=30)
    whole = shop.new()
    assert shop.call(shop.command("train", whole, config))[0] == 0
    for _ in range(trials):
        run, file = shop.new(), rng.choice(sorted(shop.photos.rglob("*.png")))
        content = file.read_bytes()
        process = shop.start(shop.command("train", run, config))
        until(lambda: begun(run / "metrics.jsonl"), process)  # noqa: B023
        file.unlink()
        code, told = process.wait()
        if code != 0:  # 0: an image of the test set
            refused((code, told), file.name, "has disappeared since the run started")
            refused(shop.call(shop.command("train", run, config)), f"{file.parent.name}/{file.name} is missing")
        file.write_bytes(content)
        shop.goes_on("train", run, config, whole)
    return trials


def changed_images(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Change images between a kill -9 and the next command.

    The changed images must be refused with the first difference; with the right images, in another place, the run resumes.
    """
    for trial in range(trials):
        stage = ("train", "retrain")[trial % 2]
        run, photos = shop.before(stage), shop.new("photos")
        killed(shop, stage, run, rng)
        shutil.copytree(shop.photos, photos)
        # The command for training names the images; the other stages take them from the run.
        again = [*shop.command("train", run), "--data", str(photos)]
        change, told = list(CHANGES.values())[trial % len(CHANGES)]
        change(photos, rng)
        if (run / "data.jsonl").exists():  # the run had begun
            refused(shop.call(again), told, "the images are not those that")
        shutil.rmtree(photos)
        shutil.copytree(shop.photos, photos)
        code, said = shop.call(again)
        assert code == 0, said
        shop.goes_on(stage, run)
        shutil.rmtree(photos)
    return trials


def swap_classes(photos: Path, rng: random.Random) -> None:
    for old, new in (("a", "aside"), ("b", "a"), ("aside", "b")):
        (photos / old).rename(photos / new)


def replace_all(photos: Path, rng: random.Random) -> None:
    paint(photos, {"a": 20, "b": 20, "c": 20}, first=rng.randrange(1, 10**6), size=(10, 9))


def rename_some(photos: Path, rng: random.Random) -> None:
    for file in rng.sample(sorted(photos.rglob("*.png")), 2):
        file.rename(file.with_name(f"new {file.name}"))


def flip_a_bit(photos: Path, rng: random.Random) -> None:
    """Flip a bit of a file without changing its size and time."""
    file = rng.choice(sorted(photos.rglob("*.png")))
    status, content = file.stat(), bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[Path, random.Random], object], str]] = {
    "two classes swapped": (swap_classes, "a/0.png has changed"),
    "all replaced": (replace_all, "a/0.png has changed"),
    "two renamed": (rename_some, ".png is now called "),
    "one added": (lambda photos, rng: picture(1).save(photos / "b" / "new.png"), "b/new.png is new"),
    "a bit flipped": (flip_a_bit, ".png has changed"),
    "one lost": (lambda photos, rng: rng.choice(sorted(photos.rglob("*.png"))).unlink(), ".png is missing"),
}


def class_without_text(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Use a class folder whose name is not UTF-8; it must be refused before training."""
    for _ in range(trials):
        run, photos = shop.new(), shop.new("photos")
        shutil.copytree(shop.photos, photos)
        strange = os.fsencode(photos) + b"/caf" + bytes([rng.randrange(0x80, 0x100)])
        (photos / "b").rename(os.fsdecode(strange))
        config = shop.write_config("strange.yaml", {"source": str(photos)})
        refused(shop.call(shop.command("run", run, config)), "the name of the class folder caf\\x", "is not UTF-8")
        assert not run.exists()
        Path(os.fsdecode(strange)).rename(photos / "b")
        shop.goes_on("run", run, config)
    return trials


def endless_files(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Put pipes, devices and circular links among the images, with little memory; the job must name and skip them."""
    for _ in range(trials):
        photos, whole, run = shop.new("photos"), shop.new(), shop.new()
        shutil.copytree(shop.photos, photos)
        for name in ("a", "b", "c"):
            os.mkfifo(photos / name / "pipe.png")
            (photos / name / "zero.png").symlink_to("/dev/zero")
            (photos / name / "random.jpg").symlink_to("/dev/urandom")
            (photos / name / "up").symlink_to("..")
        config = shop.write_config("endless.yaml", {"source": str(photos)})
        for target in (whole, run):
            process = shop.start(shop.command("run", target, config), partial(limit_memory, 1000))
            if target is run:
                pause(process, rng.uniform(0, shop.finished("run")[1]))
                process.kill()
            code, told = process.wait()
            assert target is run or code == 0, told
        assert "zero.png" in (whole / "log.txt").read_text()
        shop.goes_on("run", run, config, whole)
    return trials


def tested_on_training(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Use training images as the test set; no accuracy may be shown as a result, or written without the reason."""
    for _ in range(trials):
        photos, run = shop.new("photos"), shop.new()
        for part in ("train", "test"):
            shutil.copytree(shop.photos, photos / part)
        config = shop.write_config("tainted.yaml", {"source": str(photos)})
        code, told = shop.call(shop.command("run", run, config))
        assert code == 0, told
        for name in ("test.json", "export.json"):
            found = json.loads((run / "models" / "macs-60K" / name).read_text())
            assert found["withheld"], found
            assert found["caveats"][0].startswith("60 of 60 test images are exact copies"), found
        assert json.loads((run / "arch.json").read_text())["test_withheld"]
        assert "its test accuracy is withheld" in (run / "report.html").read_text()
    return trials


def run_among_images(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Put the run directory inside the images, directly or through a link; it must be refused without writing."""
    before = sorted(shop.photos.rglob("*"))
    for trial in range(trials):
        place = (shop.photos / "run", shop.photos / "a" / "run", shop.new("link") / "run")[trial % 3]
        if trial % 3 == 2:
            place.parent.symlink_to(shop.photos)
        stage = ("train", "run")[trial % 2]
        refused(shop.call(shop.command(stage, place)), "lies inside of --data")
        assert sorted(shop.photos.rglob("*")) == before
    shop.goes_on("train", shop.new())
    return trials


def two_at_once(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Start a second process on a run directory, which must be refused; the lock of a killed process must not
    matter."""
    for trial in range(trials):
        stage = STAGES[trial % len(STAGES)]
        run = shop.before(stage)
        first = shop.start(shop.command(stage, run))
        until(lambda: locked(run / ".lock"), first)  # noqa: B023
        first.kill(signal.SIGSTOP)  # so that it does not finish too soon
        refused(shop.call(shop.command(stage, run)), "is in use by another greedynas process")
        first.kill()
        first.wait()
        shop.goes_on(stage, run)
    return trials


def locked(file: Path) -> bool:
    inode = f":{file.stat().st_ino} " if file.exists() else None
    return inode is not None and any(inode in line for line in Path("/proc/locks").read_text().splitlines())


def clock_jumps(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Let the wall clock jump by days, and the monotonic clock by minutes between any two readings."""
    for trial in range(trials):
        stage = STAGES[trial % len(STAGES)]
        run = shop.before(stage)

        def mad() -> None:
            now, awake = time.time, time.monotonic
            slept = [0.0]

            def monotonic() -> float:
                slept[0] += rng.expovariate(1 / 100)
                return awake() + slept[0]

            time.time = lambda: now() + rng.uniform(-1e6, 1e6)
            time.monotonic = monotonic

        code, told = shop.call(shop.command(stage, run), mad)
        assert (code, "Traceback" in told) == (0, False), told
        assert not (different := differences(shop.finished(stage)[0], run)), different
    return trials


def out_of_memory(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Limit memory below a batch of large images; the error must name a batch size that fits, and training with it
    works."""
    space = {"space": {**large_space(), "image_size": 384}}
    config = shop.write_config("large.yaml", batch_size=40, filter_images=3, bn_images=3, max_epochs=1)
    import yaml

    settings = yaml.safe_load(config.read_text()) | space
    for _ in range(trials):
        run = shop.new()
        config.write_text(yaml.safe_dump(settings))
        code, told = shop.call(shop.command("train", run, config), partial(limit_memory, 500))
        refused((code, told), "out of memory with train.batch_size = 40;")
        fits = int(told.split(" fits here")[0].split()[-1])
        assert 2 <= fits < 40, told
        settings["train"]["batch_size"] = fits
        config.write_text(yaml.safe_dump(settings))
        settings["train"]["batch_size"] = 40
        code, told = shop.call(shop.command("train", shop.new(), config), partial(limit_memory, 500))
        assert code == 0, told
    return trials


def large_space() -> dict[str, Any]:
    from tests.helpers.training import tiny_space

    return tiny_space(["MB6_K3", "MB3_K3"], repeat=1).model_dump(mode="json")


def limit_memory(megabytes: int) -> None:
    """Limit the address space to its current size plus a number of megabytes."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 10**6, resource.RLIM_INFINITY))


def gpu_out_of_memory(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Raise a GPU's out-of-memory error for batches of more than 6 images, in training and in retraining."""
    for stage in ("train", "retrain")[:trials]:
        run = shop.before(stage)
        refused(
            shop.call(shop.command(stage, run), small_gpu), f"out of memory with {stage}.batch_size = ", "fits here"
        )
        shop.goes_on(stage, run)
    return trials


def small_gpu() -> None:
    conv = torch.nn.Conv2d.forward

    def forward(module: Any, images: torch.Tensor) -> torch.Tensor:
        if module.training and torch.is_grad_enabled() and len(images) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return conv(module, images)

    torch.nn.Conv2d.forward = forward  # type: ignore[method-assign, assignment]


# Many ranks


def lost_rank(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Kill a worker under torchrun, which restarts the group; the result must be that of two undisturbed ranks."""
    config = shop.write_config("ranks.yaml", max_epochs=40)
    whole = shop.new()
    assert torchrun(shop, whole, config).wait() == 0
    for trial in range(trials):
        run = shop.new()
        group = torchrun(shop, run, config, "--max-restarts", "1")
        while group.poll() is None and not list((run / "supernet").glob("step-*.safetensors")):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        workers = children(group.pid)
        assert len(workers) == 2, workers
        os.kill(workers[trial % 2], signal.SIGKILL)
        code = group.wait(PATIENT)
        assert code == 0, code
        assert not (different := differences(whole, run)), different
        assert "resuming from step" in (run / "log.txt").read_text()
    return trials


PATIENT = 240  # seconds, for two processes that import everything twice


def torchrun(shop: Workshop, run: Path, config: Path, *options: str) -> subprocess.Popen[bytes]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launch, "-m", "greedynas", *shop.command("train", run, config)]
    with shop.new("told").open("wb") as told:
        return subprocess.Popen(command, env=environment, stdout=told, stderr=told)


def children(parent: int) -> list[int]:
    """Return the processes that a process has started, oldest first."""
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(child) for child in text.split() if reached(Path(f"/proc/{child}/cmdline"), 0)]


FAULTS: dict[str, tuple[Callable[[Workshop, int, random.Random], int], int]] = {
    "kill -9 at a random moment": (kill, 40),
    "SIGTERM or Ctrl-C at a random moment": (terminate, 15),
    "SIGTERM in the middle of a training": (terminate_training, 3),
    "full disk (a small file system)": (full_disk, 6),
    "full disk (ENOSPC at the system call)": (full_disk_injected, 8),
    "limit on the size of files": (largest_file, 2),
    "read-only run directory": (read_only, 5),
    "checkpoint cut or bit-flipped": (damage, 8),
    "image of the data set deleted": (lost_image, 3),
    "images changed between two commands": (changed_images, 12),
    "class whose name is no UTF-8": (class_without_text, 1),
    "pipes and devices among the images": (endless_files, 2),
    "test set of training images": (tested_on_training, 1),
    "run directory among the images": (run_among_images, 3),
    "two processes on one run": (two_at_once, 5),
    "clock jumps": (clock_jumps, 5),
    "out of memory (CPU)": (out_of_memory, 1),
    "out of memory (GPU, injected)": (gpu_out_of_memory, 2),
    "worker killed under torchrun": (lost_rank, 2),
}
FEW = {  # number of trials in the normal tests
    "kill -9 at a random moment": 3,
    "SIGTERM or Ctrl-C at a random moment": 3,
    "full disk (ENOSPC at the system call)": 2,
    "limit on the size of files": 1,
    "checkpoint cut or bit-flipped": 1,
    "images changed between two commands": 2,
    "run directory among the images": 2,
    "two processes on one run": 1,
    "clock jumps": 1,
    "out of memory (GPU, injected)": 1,
}
