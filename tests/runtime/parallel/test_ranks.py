import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from greedynas import GreedyNASError, Supernet
from greedynas.runtime.parallel import ranks as distributed
from greedynas.runtime.parallel.ranks import Group, refuse_small_batch, share, share_of_batch
from greedynas.runtime.parallel.rendezvous import agreed_name
from greedynas.spaces.describe import space_facts
from tests.helpers.pictures import paint, spoil
from tests.helpers.ranks import JOBS, TINY, launch, left, outcome, start
from tests.helpers.training import SETTINGS, same_tensors, tiny_space, train

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = {"sync_bn": True, "class_weights": [0.5, 1.0, 1.5], "label_smoothing": 0.1, "clip_grad": 2.0}
SAMPLERS = {
    "greedy": {"max_epochs": 24, "stopping": True, "alpha": 0.05, "pool_size": 16},
    "uniform": {"sampler": "uniform", "max_epochs": 13},
    "fair": {"sampler": "fair", "max_epochs": 13},
}
RESUMED = {"max_epochs": 8, "checkpoint_steps": 4, "sync_bn": True}
READ = {
    "kept": {"class_weights": "balanced"},
    "kept-whole": {"augment": "resized_crop"},
    "streamed": {"memory_gb": 0},
    "by-workers": {"memory_gb": 0, "workers": 1, "augment": "resized_crop"},
}
FIT = {"epochs": 4, "batch_size": 10, "dropout": 0.0, "ema": 0.9, "mixup": 0.5, "cutmix": 0.5, "clip_grad": 2.0}


def alone(folder, job, name, **arguments):
    """Return the result of a job in this process, without other ranks."""
    JOBS[job](folder, name=name, **arguments)
    return left(folder, name)[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory, photos, one_thread):
    """Return the folder with the results of many jobs on two ranks, which are started once to save time."""
    folder, photos = tmp_path_factory.mktemp("two"), str(photos)
    with pytest.raises(KeyboardInterrupt):
        alone(folder, "train", "begun", photos=photos, out=str(folder / "grown"), stop_after=14, **RESUMED)
    spoilt = paint(folder / "spoilt", {"a": 70, "b": 60, "c": 90}, size=(10, 9))
    for bad in sorted(spoilt.rglob("*.png"))[3:200:50]:
        spoil(bad)
    for copy in ("one-run", "two-run"):
        more = {"double": False, "max_epochs": 3, "experimental": {"snapshots": 3}}
        alone(folder, "train", "searched", photos=photos, out=str(folder / copy), **more)
        config = yaml.safe_load((folder / copy / "config.yaml").read_text())
        config["data"] |= {"source": photos, "workers": 0, "pad": 1, "val_images": 12, "test_images": 6}
        (folder / copy / "config.yaml").write_text(yaml.safe_dump(config))
    alone(folder, "study", "study", photos=photos, out=str(folder / "one-study"))
    shutil.copytree(folder / "one-study", folder / "two-study")
    for result in (folder / "two-study/parts").glob(
        "greedy-0.*"
    ):  # as if the study had been stopped after the training
        result.unlink()
    launch(
        2,
        folder,
        *(("train", {"name": name, "photos": photos, **EXACT, **more}) for name, more in SAMPLERS.items()),
        ("train", {"name": "float32", "photos": photos, "double": False, "max_epochs": 5}),
        ("train", {"name": "ended", "photos": photos, "double": False, "end_after": 2}),
        ("train", {"name": "grown", "photos": photos, "out": str(folder / "grown"), **RESUMED}),
        ("evaluate", {"name": "evaluated", "photos": photos}),
        ("search", {"name": "search", "run": str(folder / "two-run")}),
        ("study", {"name": "study", "photos": photos, "out": str(folder / "two-study")}),
        ("fit", {"name": "fitted", "photos": photos, "sync_bn": True, **FIT}),
        ("fit", {"name": "fitted32", "photos": photos, "double": False, **FIT, "dropout": 0.2}),
        *(("read", {"name": name, "photos": str(spoilt), **more}) for name, more in READ.items()),
    )
    return folder


def paths_of(result):
    return [update["paths"] for update in result["updates"]]


def assert_same_training(one, ranks, since=0):
    """Check that from update `since` on, every rank draws and learns the same as one process, and shares its images."""
    updates = one["updates"][since:]
    for rank in ranks:
        assert paths_of(rank) == [update["paths"] for update in updates]
        assert [path for path, _ in rank["pool"]] == [path for path, _ in one["pool"]]
        assert rank["stopped"] == one["stopped"]
        assert rank["images"] == one["images"]
        for name, tensor in one["weights"].items():
            torch.testing.assert_close(rank["weights"][name], tensor, rtol=0, atol=1e-9)
        assert [u["loss"] for u in rank["updates"]] == pytest.approx([u["loss"] for u in updates], abs=1e-6)
    for update, *shares in zip(updates, *(rank["updates"] for rank in ranks), strict=True):
        assert sorted(itertools.chain(*(share["images"] for share in shares))) == sorted(update["images"])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_two_ranks_train_like_one(sampler, two, photos, tmp_path):
    one = alone(tmp_path, "train", sampler, photos=str(photos), **EXACT, **SAMPLERS[sampler])
    ranks = left(two, sampler, 2)
    assert len(one["updates"]) >= 50
    assert_same_training(one, ranks)
    if sampler == "greedy":  # stopped by its own principle
        assert 13 <= one["stopped"][0] < 24
        assert "steady" in one["stopped"][1]
    assert [len(update["images"]) for update in ranks[0]["updates"]] == [4] * len(one["updates"])  # of 10


def test_float32_ranks_hold_the_same_bits(two):
    first, second = left(two, "float32", 2)
    assert same_tensors(first["weights"], second["weights"])  # including running statistics
    assert first["pool"] == second["pool"]
    assert paths_of(first) == paths_of(second)
    assert [u["loss"] for u in first["updates"]] == [u["loss"] for u in second["updates"]]
    assert [u["images"] for u in first["updates"]] != [u["images"] for u in second["updates"]]


@pytest.mark.parametrize("name", [*SAMPLERS, "float32"])
def test_only_the_gradients_of_the_active_path_are_sent(two, name):
    first, _ = left(two, name, 2)
    whole = sum(tensor.nbytes for key, tensor in first["weights"].items() if key.endswith((".weight", ".bias")))
    for update in first["updates"]:
        assert update["sent"]["gradients"] == update["active"] <= whole
        assert update["sent"]["buckets"] == 1  # the gradients of a path are small enough for one
    fewest = min(update["active"] for update in first["updates"])
    assert fewest < whole / 2 or name == "fair"  # the fair sampler trains every op of every layer in an update


def test_a_callback_ends_all_ranks_and_the_first_one_alone_calls_it(two):
    first, second = left(two, "ended", 2)
    assert first["stopped"] == second["stopped"] == (2, "enough is enough")
    steps, filterings, epochs = 8, 2, 2
    assert first["told"] == (1, steps + filterings + epochs)
    assert second["told"] == (0, 0)
    assert same_tensors(first["weights"], second["weights"])


def test_gradients_leave_in_buckets_of_bounded_size(monkeypatch):
    from greedynas.runtime.parallel import reduction

    net = torch.nn.Sequential(*(torch.nn.Linear(10, 10, bias=False) for _ in range(6)))  # 400 bytes each
    monkeypatch.setattr(reduction, "BUCKET", 800)
    parameters = list(net.parameters())
    assert list(reduction._in_buckets(parameters)) == [parameters[:2], parameters[2:4], parameters[4:]]


def test_the_traffic_that_describe_shows_is_the_mean_over_all_paths():
    space = tiny_space()
    net = Supernet(space)
    sizes = [sum(p.nbytes for p in net.path_parameters(path)) for path in np.ndindex(*space.num_ops)]
    shown = space_facts(space)["gradient_bytes"]
    assert shown["mean"] == pytest.approx(np.mean(sizes))
    assert shown["most"] == max(sizes)
    assert shown["supernet"] == sum(p.nbytes for p in net.parameters())


# Other numbers of ranks on resuming


def test_a_training_is_started_on_one_rank_and_finished_on_two(two, photos, tmp_path):
    one = alone(tmp_path, "train", "whole", photos=str(photos), **RESUMED)
    assert_same_training(one, left(two, "grown", 2), since=12)  # the checkpoint before update 14


def test_a_training_on_two_ranks_is_finished_on_one_after_one_was_killed(photos, tmp_path):
    arguments = {"photos": str(photos), "out": str(tmp_path / "run"), **RESUMED}
    jobs = [("train", {"name": "begun", **arguments, "stop_after": 14})]
    codes, _, said = outcome(start(2, "tests.helpers.ranks", tmp_path, json.dumps(jobs)))
    assert codes[1] == -signal.SIGKILL
    assert codes[0] == 1
    assert "a rank was lost; give the same command again to resume from the last checkpoint" in said[0].splitlines()[-1]
    one = alone(tmp_path, "train", "whole", photos=str(photos), **RESUMED)
    assert_same_training(one, [alone(tmp_path, "train", "shrunk", **arguments)], since=12)


def test_a_restarted_group_does_not_read_entries_of_an_earlier_one():
    """Check a store that keeps old entries, with ranks that start at different times and change in number."""
    store = torch.distributed.HashStore()
    names = []
    for size, late in ((3, 0), (3, 2), (2, 1), (3, 1)):
        with ThreadPoolExecutor(size) as threads:
            meeting = []
            for rank in sorted(range(size), key=lambda rank, late=late: rank == late):
                meeting.append(threads.submit(agreed_name, store, rank, size, time.monotonic() + 100))
                time.sleep(0.1)
            found = {rank.result(20) for rank in meeting}
        assert len(found) == 1
        names += found
    assert len(set(names)) == 4


# Evaluation, search, retraining


def test_each_path_is_evaluated_by_one_rank_alone(two, photos, tmp_path):
    one, ranks = alone(tmp_path, "evaluate", "evaluated", photos=str(photos)), left(two, "evaluated", 2)
    assert sum(rank["passes"] for rank in ranks) == one["passes"]
    assert all(rank["passes"] > one["passes"] / 3 for rank in ranks)
    for rank in ranks:
        for result, expected in zip(rank["results"], one["results"], strict=True):
            assert result["layers_run"] >= expected["layers_run"]  # ranks do not share prefixes
            assert {**result, "layers_run": None} == {**expected, "layers_run": None}


def test_search_on_two_ranks_finds_the_same_networks(two, tmp_path):
    one = alone(tmp_path, "search", "search", run=str(two / "one-run"))
    assert one[0]["supernets"] == 3
    for rank in left(two, "search", 2):
        assert rank == one
    file = "searches/macs-100M/search.json"
    written = [json.loads((two / run / file).read_text()) for run in ("one-run", "two-run")]
    assert [{**search, "seconds": None} for search in written] == [one[0], one[0]]
    assert (two / "two-run/arch.json").read_text() == (two / "one-run/arch.json").read_text()


def test_study_macro_on_two_ranks_gives_the_same_ranking(two):
    (one,) = left(two, "study")
    assert len(one["batch_accuracy"]) == 81
    assert left(two, "study", 2) == [one, one]
    assert (two / "two-study/parts/greedy-0.json").is_file()


def test_two_ranks_retrain_like_one(two, photos, tmp_path):
    one = alone(tmp_path, "fit", "fitted", photos=str(photos), sync_bn=True, **FIT)
    first, second = left(two, "fitted", 2)
    assert same_tensors(first["weights"], second["weights"])
    assert same_tensors(first["average"], second["average"])
    assert first["images"] == one["images"]
    for kind in ("weights", "average"):
        for name, tensor in one[kind].items():
            torch.testing.assert_close(first[kind][name], tensor, rtol=0, atol=1e-9)


def test_retrained_ranks_hold_the_same_bits_in_float32(two):
    first, second = left(two, "fitted32", 2)
    assert same_tensors(first["weights"], second["weights"])
    assert same_tensors(first["average"], second["average"])


# Data


@pytest.mark.parametrize("name", READ)
def test_ranks_share_the_images_that_one_process_reads(name, two, tmp_path):
    one = alone(tmp_path, "read", name, photos=str(two / "spoilt"), **READ[name])
    ranks = left(two, name, 2)
    for rank in ranks:
        assert torch.equal(rank["images"], one["images"])
        assert torch.equal(rank["labels"], one["labels"])
        assert rank["notes"] == one["notes"]
        assert (rank["weights"] is None) == (one["weights"] is None)
        assert one["weights"] is None or torch.equal(rank["weights"], one["weights"])
    assert sum("unreadable" in note for note in one["notes"]) == (4 if name.startswith("kept") else 0)
    for batch, *shares in zip(one["batches"], *(rank["batches"] for rank in ranks), strict=True):
        images, labels = zip(*shares, strict=True)
        assert sorted(itertools.chain(*images)) == sorted(batch[0])
        assert sorted(itertools.chain(*labels)) == sorted(batch[1])


# Shares


def as_rank(monkeypatch, rank, size):
    monkeypatch.setattr(distributed, "_group", Group(rank, size, rank, size, None, None))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("images", [16, 17, 64, 101])
def test_shares_of_a_batch_have_no_overlap_and_no_loss(images, size, monkeypatch):
    batch = np.random.default_rng(0).permutation(1000)[:images]
    shares = []
    for rank in range(size):
        as_rank(monkeypatch, rank, size)
        shares.append(share_of_batch(batch))
    assert sorted(np.concatenate(shares)) == sorted(batch)
    assert max(map(len, shares)) - min(map(len, shares)) <= 3
    partner = dict(zip(batch[: images // 2 * 2], batch[: images // 2 * 2][::-1], strict=True))  # as mixup pairs them
    for part in shares:
        even = part[: len(part) // 2 * 2]
        assert [partner[image] for image in even] == list(even[::-1])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_shares_of_paths_have_no_overlap_and_no_loss(size, monkeypatch):
    shares = []
    for rank in range(size):
        as_rank(monkeypatch, rank, size)
        shares.append(share("abcdefg"))
    assert "".join(shares) == "abcdefg"
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_too_few_images_for_the_ranks_are_refused(monkeypatch):
    as_rank(monkeypatch, 0, 4)
    refuse_small_batch(8, "train.batch_size")
    with pytest.raises(GreedyNASError, match=r"train.batch_size gives 7 images for 4 ranks.*at least two"):
        refuse_small_batch(7, "train.batch_size")


@pytest.mark.parametrize(
    ("settings", "size", "told"),
    [
        ({"batch_size": 10}, 6, "train.batch_size gives 10 images for 6 ranks"),
        ({"batch_size": 100}, 22, "train.batch_size gives 42 images for 22 ranks"),
        ({"batch_size": 40, "sampler": "darts"}, 7, "data.val_images gives 12 images for 7 ranks"),
        ({"batch_size": 10, "sampler": "darts"}, 6, "data.val_images gives 10 images for 6 ranks"),
    ],
)
def test_a_training_with_too_few_images_for_the_ranks_is_refused(data, monkeypatch, settings, size, told):
    as_rank(monkeypatch, 0, size)
    with pytest.raises(GreedyNASError, match=told):
        train(data, **settings)


def test_one_process_sends_nothing():
    assert (distributed.rank(), distributed.size(), distributed.is_first()) == (0, 1, True)
    thing = object()  # no message could carry it
    assert distributed.broadcast(thing) is thing
    assert distributed.on_first(lambda: thing) is thing
    assert distributed.gather_values(thing) == [thing]
    with distributed.ranks():
        assert distributed.size() == 1


# The command line


@pytest.fixture
def config(tmp_path):
    """Write the settings of a job that takes seconds."""
    settings = {
        "name": "tiny",
        "space": tiny_space().model_dump(mode="json"),
        "train": {**SETTINGS, "max_epochs": 2, "warmup": 2, "checkpoint_steps": 2},
        "search": {"population": 4, "generations": 2, "bn_images": 6},
        "retrain": {"epochs": 2, "batch_size": 10},
        "data": {"workers": 0, "pad": 1, "val_images": 12, "test_images": 6},
    }
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def test_all_ranks_fail_together_with_the_first_cause(config, tmp_path):
    """Check a broken file that only one rank reads, while the others wait for its gradients."""
    photos = paint(tmp_path / "photos", {"a": 20, "b": 20, "c": 20}, size=(10, 9))
    bad = sorted(photos.rglob("*.png"))[7]
    spoil(bad)
    stream = ("--set", "data.memory_gb=0", "--set", "data.unreadable=refuse", "--set", "data.check_duplicates=false")
    command = ("greedynas", "train", config, "--data", photos, "--out", tmp_path / "run", *stream)
    codes, _, said = outcome(start(2, *command))
    assert codes == [2, 2], said
    for message in said:
        assert len(message.splitlines()) == 1
        assert str(bad) in message
        assert "repair or remove it" in message


def test_a_signal_to_one_rank_stops_all_of_them_with_a_checkpoint(config, photos, tmp_path):
    out = tmp_path / "run"
    long = ("--set", "train.max_epochs=100000")
    ranks = start(2, "greedynas", "train", config, "--data", photos, "--out", out, *long)
    until = time.monotonic() + 100
    while not list((out / "supernet").glob("step-*.safetensors")) and time.monotonic() < until:
        time.sleep(0.02)
    ranks[1].terminate()
    codes, _, said = outcome(ranks)
    assert codes == [128 + signal.SIGTERM] * 2, said
    step = re.search(r"a checkpoint of step (\d+) is written", said[0])[1]
    assert list((out / "supernet").glob(f"step-{int(step):09d}-*.safetensors"))


def test_a_rank_ends_cleanly_while_threads_of_torch_still_work():
    """Check threads like those of torch's collectives, with which the process aborted at the end of Python in CI."""
    code = """
import atexit, sys, threading, time
import torch
from greedynas.cli.main import main

def work():
    while True:
        torch.ones(1000, 100).mm(torch.ones(100, 100))

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
atexit.register(print, "tidied up")
sys.argv = ["greedynas", *sys.argv[1:]]
main()
"""
    for arguments, expected in ((("--version",), 0), (("describe", "--space", "nowhere"), 2)):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "WORLD_SIZE": "1"}, check=False
        )
        assert done.returncode == expected, done.stderr
        assert done.stdout.splitlines()[-1] == "tidied up"
        assert len(done.stderr.splitlines()) == (expected == 2)


def children(process):
    """Return the ids of the processes that a process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == process:
            found.append(int(folder.name))
    return sorted(found)


def test_the_whole_job_under_torchrun_survives_the_loss_of_a_worker(config, photos, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "greedynas", "run", str(config)]
    command += ["--data", str(photos), "--out", str(out), "--json"]
    job = subprocess.Popen(
        command, env={**os.environ, **TINY}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 100
        while not list((out / "supernet").glob("step-*.safetensors")) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(children(job.pid)[-1], signal.SIGKILL)
        printed, said = job.communicate(timeout=200)
    finally:
        job.kill()
    assert job.returncode == 0, said
    result = json.loads(printed[printed.index("{") :])  # printed by one rank only
    assert result["run"] == str(out)
    assert "resuming from step" in (out / "log.txt").read_text()
    for file in ("report.html", "model.onnx", "model.safetensors", "arch.json"):
        assert (out / file).is_file()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, 9))  # every step exists once
