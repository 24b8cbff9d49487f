"""The faults: each function stages one kind, so often as it is told, and returns how many trials there were.

A trial that loses something raises. Where this machine cannot stage a fault (a full disk without the right to mount one), the
system call is made to fail instead.
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
    """kill -9 at random moments of every stage, some of them twice in a row."""
    for trial in range(trials):
        stage = stages[trial % len(stages)]
        run = shop.before(stage)
        for _ in range(1 + trial % 2):
            killed(shop, stage, run, rng)
        shop.goes_on(stage, run)
        shutil.rmtree(run)
    return trials


def killed(shop: Workshop, stage: str, run: Path, rng: random.Random) -> None:
    """Once, at a random moment; one that comes too late is tried again, earlier."""
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
    """SIGTERM (and, every third time, Ctrl-C) at random moments: a clear message, exit code 143 (130), nothing lost."""
    for trial in range(trials):
        stage = stages[trial % len(stages)]
        number = signal.SIGINT if trial % 3 == 2 else signal.SIGTERM
        run, length = shop.before(stage), shop.finished(stage)[1]
        process = shop.start(shop.command(stage, run))
        until(process.listens, process)
        pause(process, rng.uniform(0.2, 0.9) * length)
        if process.listens():
            os.killpg(process.pid, number)  # workers get it too, as from a scheduler
        code, told = process.wait()
        if code != 0:  # it was not at its end already
            assert code == 128 + number, (code, told)
            assert f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}; " in told, told
            assert "Traceback" not in told, told
        shop.goes_on(stage, run)
        shutil.rmtree(run)
    return trials


def terminate_training(shop: Workshop, trials: int, rng: random.Random) -> int:
    """SIGTERM in the middle of a training: the checkpoint that is written is of the step it has reached."""
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
    """Writes through the system's calls fail with ENOSPC after so many bytes, after half of what they were to write."""

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

        full = _Handle.__new__(_Handle)  # it passes everything else on
        full.handle, full.write = handle, limited
        return full


def full_disk_injected(shop: Workshop, trials: int, rng: random.Random, stages: tuple[str, ...] = STAGES[:4]) -> int:
    """ENOSPC at a random byte of what a stage writes."""
    for trial in range(trials):
        stage = stages[trial % len(stages)]
        run = shop.before(stage)
        ended = shop.call(shop.command(stage, run), Quota(rng.randrange(50, written_by(shop, stage))))
        refused(ended, "No space left on device")
        shop.goes_on(stage, run)
    return trials


def written_by(shop: Workshop, stage: str) -> int:
    """Roughly how many bytes a stage writes that survive it: fewer than it writes in all."""
    old = shop.before(stage)
    new = shop.finished(stage)[0]
    size = sum(file.stat().st_size for file in new.rglob("*") if file.is_file())
    return size - sum(file.stat().st_size for file in old.rglob("*") if file.is_file())


def largest_file(shop: Workshop, trials: int, rng: random.Random) -> int:
    """A limit of the system on the size of files, below that of a checkpoint."""
    for stage in ("train", "retrain")[:trials]:
        run = shop.before(stage)
        # Python ignores SIGXFSZ: the write fails with EFBIG.
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        refused(shop.call(shop.command(stage, run), limit), "File too large")
        shop.goes_on(stage, run)
    return trials


def full_disk(shop: Workshop, trials: int, rng: random.Random) -> int:
    """A file system of 2 MB that something else has filled, up to a random rest."""
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
    """Run directories that cannot be written to: each stage says so."""
    for stage in STAGES[:trials]:
        run = shop.before(stage)
        run.mkdir(exist_ok=True)
        with mounted(run, "--bind", str(run)):
            subprocess.run(["mount", "-o", "remount,bind,ro", run], check=True)
            refused(shop.call(shop.command(stage, run)), str(run), "Read-only file system")
        shop.goes_on(stage, run)
    return trials


class CannotStage(Exception):
    """This machine does not allow it."""


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
    """Checkpoints cut or with a flipped bit: the newest, or all of them."""
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
    """A file of a streaming data set deleted while it is trained on, and brought back."""
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
            refused((code, told), file.name, "is gone since the run began")
            refused(shop.call(shop.command("train", run, config)), f"{file.parent.name}/{file.name} is missing")
        file.write_bytes(content)
        shop.goes_on("train", run, config, whole)
    return trials


def changed_images(shop: Workshop, trials: int, rng: random.Random) -> int:
    """Images that change between a kill -9 and the next command: refused with the first difference, and the right ones go on,
    from another place."""
    for trial in range(trials):
        stage = ("train", "retrain")[trial % 2]
        run, photos = shop.before(stage), shop.new("photos")
        killed(shop, stage, run, rng)
        shutil.copytree(shop.photos, photos)
        # Where the images are, the command for training says; the other stages take it from the run.
        again = [*shop.command("train", run), "--data", str(photos)]
        change, told = list(CHANGES.values())[trial % len(CHANGES)]
        change(photos, rng)
        if (run / "data.jsonl").exists():  # it had begun
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
    """With the size and the time of before."""
    file = rng.choice(sorted(photos.rglob("*.png")))
    status, content = file.stat(), bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[Path, random.Random], object], str]] = {
    "two classes swapped": (swap_classes, "a/0.png has other contents"),
    "all replaced": (replace_all, "a/0.png has other contents"),
    "two renamed": (rename_some, ".png is now called "),
    "one added": (lambda photos, rng: picture(1).save(photos / "b" / "new.png"), "b/new.png is new"),
    "a bit flipped": (flip_a_bit, ".png has other contents"),
    "one lost": (lambda photos, rng: rng.choice(sorted(photos.rglob("*.png"))).unlink(), ".png is missing"),
}


def class_without_text(shop: Workshop, trials: int, rng: random.Random) -> int:
    """A class folder whose name is no UTF-8: refused before anything is trained."""
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
    """Pipes, devices and links in circles among the images, with little memory: named, and the job is done without them."""
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
    """A test set of training images: no accuracy is shown as a result, in no file without the reason beside it."""
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
    """A run directory inside of the images, by its name or through a link: refused, and nothing is written there."""
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
    """A second process on a run directory is refused; the lock of one that was killed is no obstacle."""
    for trial in range(trials):
        stage = STAGES[trial % len(STAGES)]
        run = shop.before(stage)
        first = shop.start(shop.command(stage, run))
        until(lambda: locked(run / ".lock"), first)  # noqa: B023
        first.kill(signal.SIGSTOP)  # so that it is not over too soon
        refused(shop.call(shop.command(stage, run)), "is in use by another greedynas process")
        first.kill()
        first.wait()
        shop.goes_on(stage, run)
    return trials


def locked(file: Path) -> bool:
    inode = f":{file.stat().st_ino} " if file.exists() else None
    return inode is not None and any(inode in line for line in Path("/proc/locks").read_text().splitlines())


def clock_jumps(shop: Workshop, trials: int, rng: random.Random) -> int:
    """The wall clock leaps back and forth by days, and the machine seems to sleep between any two looks at the clock."""
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
    """No memory for a batch of large images: the line names a batch that fits, and with it training goes."""
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
    """As much address space as there is now, and so much more."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 10**6, resource.RLIM_INFINITY))


def gpu_out_of_memory(shop: Workshop, trials: int, rng: random.Random) -> int:
    """What a GPU raises for batches of more than 6 images, in training and in retraining."""
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
    """kill -9 of one worker under torchrun, which starts the group again: the end is that of two ranks undisturbed."""
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
        assert "going on from step" in (run / "log.txt").read_text()
    return trials


PATIENT = 240  # seconds, for two processes that import everything twice


def torchrun(shop: Workshop, run: Path, config: Path, *options: str) -> subprocess.Popen[bytes]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launch, "-m", "greedynas", *shop.command("train", run, config)]
    with shop.new("told").open("wb") as told:
        return subprocess.Popen(command, env=environment, stdout=told, stderr=told)


def children(parent: int) -> list[int]:
    """The processes that this one has started, the oldest first."""
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
FEW = {  # of the normal suite: trials
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
