"""Tests that the settings of `auto` suit the readable images, however many files are broken."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from greedynas import GreedyNASError
from greedynas.jobs.auto import auto_config
from greedynas.jobs.estimates import predict
from greedynas.stages.run import Run, read_data, read_run_config
from greedynas.stages.train import plan, settings_for, train_stage
from tests.helpers.pictures import opened, paint, spoil
from tests.helpers.speed import PACE

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LAYOUTS = {
    "one folder": {"": {"a": 10, "b": 10, "c": 10}},
    "unbalanced": {"": {"a": 6, "b": 14, "c": 40}},
    "with a test set": {"train": {"a": 12, "b": 12}, "test": {"a": 3, "b": 3}},
    "with a validation set": {"train": {"a": 8, "b": 8}, "val": {"a": 4, "b": 5}, "test": {"a": 3, "b": 3}},
}


def make(folder, layout):
    for number, (split, counts) in enumerate(LAYOUTS[layout].items()):
        paint(folder / split, counts, first=number)
    return folder


def break_some(folder, rng, count, broken):
    """Break random files, but no more than half of each class in each split."""
    files = [file for file in sorted(folder.glob("**/*.png")) if file not in broken]
    for file in rng.permutation(np.array(files, dtype=object)):
        mates = list(file.parent.iterdir())
        if count > 0 and 2 * sum(mate in broken for mate in mates) + 2 <= len(mates):
            spoil(file, ("truncated", "text", "empty")[len(broken) % 3])
            broken.add(file)
            count -= 1


def chosen(folder, seed=0, **changes):
    return auto_config({"data.source": str(folder), "seed": seed, "data.check_duplicates": False, **changes}, CPU)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_are_valid_whichever_files_are_broken(tmp_path, layout):
    fewer = 0
    for seed in range(6):
        folder = make(tmp_path / str(seed), layout)
        rng, broken = np.random.default_rng(seed), set()
        for more in (1, 4, 5):
            break_some(folder, rng, more, broken)
            config = chosen(folder, seed)
            data = read_data(config, CPU)
            settings, notes = settings_for(config, data)
            assert 2 <= settings.filter_images == min(config.train.filter_images, len(data.val))
            assert settings.model_copy(update={"filter_images": config.train.filter_images}) == config.train
            assert len(notes) == (config.train.filter_images > len(data.val))
            fewer += len(notes)
            assert set(data.train.labels.tolist()) == set(range(len(data.class_names)))
            evaluated = predict(config, data, PACE, "here").stages[0].evaluation_images
            assert evaluated % (10 * settings.filter_images) == 0
            assert plan(config)["costs"]["at most"]["evaluation_images"] == evaluated
    assert fewer > 0  # otherwise nothing is tested


def test_training_uses_readable_images_and_resumes_with_the_same_settings(tmp_path, monkeypatch):
    folder = make(tmp_path / "images", "with a validation set")
    for name in ("a/1.png", "b/0.png", "b/3.png"):
        spoil(folder / "val" / name)
    changes = {"max_epochs": 3, "warmup": 0.25, "m": 4, "k": 2, "device": "cpu", "checkpoint_steps": 1}
    config = chosen(folder, **changes)
    assert config.train.filter_images == 9
    console = Console(file=io.StringIO(), width=200)
    result = train_stage(config, tmp_path / "run", console)
    message = "6 validation images can be read, so every filtering uses these instead of 9"
    assert message in console.file.getvalue()
    assert message in (tmp_path / "run" / "log.txt").read_text()
    assert result["evaluation_images"] % 6 == 0 < result["evaluation_images"]
    assert read_run_config(tmp_path / "run") == config
    whole = Run.open(tmp_path / "run").load_checkpoint()[0]
    # The same command, stopped and repeated.
    from greedynas.rundir import checkpointing

    due = checkpointing.Checkpointing.if_due

    def stopping(self, path=None):
        due(self, path)
        if self.journal.state.step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpointing.Checkpointing, "if_due", stopping)
        with pytest.raises(KeyboardInterrupt):
            train_stage(config, tmp_path / "again", console)
    train_stage(chosen(folder, **changes), tmp_path / "again", console)
    pieces = Run.open(tmp_path / "again").load_checkpoint()[0]
    assert whole.keys() == pieces.keys()
    assert all(torch.equal(tensor, pieces[name]) for name, tensor in whole.items())


def test_a_number_that_the_user_set_is_still_refused(tmp_path, run_cli):
    folder = make(tmp_path / "images", "with a validation set")
    spoil(folder / "val" / "a" / "1.png")
    with pytest.raises(GreedyNASError, match=r"train.filter_images = 9 but there are 8 validation images; lower it"):
        train_stage(chosen(folder, filter_images=9), tmp_path / "run", Console(quiet=True))
    command = ("train", "auto", "--data", folder, "--out", tmp_path / "run", "--set", "device=cpu")
    code, _, error = run_cli(*command, "--set", "train.filter_images=9")
    assert code == 2
    assert "train.filter_images = 9 but there are 8 validation images" in error
    assert not (tmp_path / "run").exists()
    code, out, error = run_cli(*command, "--set", "max_epochs=1")
    assert (code, error) == (0, "")
    assert "8 validation images can be read" in " ".join(out.split())
    first = read_run_config(tmp_path / "run")
    assert run_cli(*command, "--set", "max_epochs=1")[0] == 0
    assert read_run_config(tmp_path / "run") == first


def test_a_validation_set_without_a_readable_image_is_one_line(tmp_path):
    folder = make(tmp_path, "with a validation set")
    for file in (folder / "val").glob("*/*.png"):
        spoil(file)
    with pytest.raises(GreedyNASError, match="no readable image is left in the validation set: repair or add some"):
        read_data(chosen(folder), CPU)


# Classes without a readable image on one side of the split


def images_of(data, images, label):
    return {data._pool.source.name(data._pool.rows[row]) for row in images._rows[images._labels == label]}


@pytest.mark.parametrize(("part", "other"), [("val", "train"), ("train", "val")])
def test_a_class_that_is_broken_on_one_side_gets_an_image_of_the_other(tmp_path, part, other):
    paint(tmp_path, {"a": 14, "b": 14})
    sizes = {"val_images": 10, "test_images": 4, "check_duplicates": False}
    before = opened(tmp_path, 8, 3, **sizes)
    names = {name: images_of(before, getattr(before, name), 1) for name in ("train", "val")}
    for name in names[part]:
        spoil(tmp_path / "b" / name.rpartition("/")[2])
    data = opened(tmp_path, 8, 3, **sizes)
    after = {name: images_of(data, getattr(data, name), 1) for name in ("train", "val")}
    moved = sorted(names[other], key=lambda name: data._pool.source.files.tolist().index(name.encode()))[0]
    assert after == {part: {moved}, other: names[other] - {moved}}
    for name in ("train", "val"):  # the other class stays where it was
        assert images_of(data, getattr(data, name), 0) == images_of(before, getattr(before, name), 0)
    again = data.split_anew
    assert again(data_settings(tmp_path, sizes), 0) is None  # the test set is held out again as well


def data_settings(folder, sizes):
    from greedynas.data.settings import DataSettings

    return DataSettings(source=str(folder), workers=0, **sizes)


def test_another_seed_splits_the_same_images_like_newly_read_ones(tmp_path):
    paint(tmp_path / "train", {"a": 8, "b": 8})
    paint(tmp_path / "test", {"a": 2, "b": 2}, first=1)
    for i in range(6):
        spoil(tmp_path / "train" / "b" / f"{i}.png")
    sizes = {"val_images": 4, "check_duplicates": False}
    first = opened(tmp_path, 8, 3, **sizes)
    for seed in range(1, 6):
        again, fresh = (
            first.split_anew(data_settings(tmp_path, sizes), seed),
            opened(tmp_path, 8, 3, seed=seed, **sizes),
        )
        assert again.identity() == fresh.identity()
        for one, other in ((again.train, fresh.train), (again.val, fresh.val)):
            assert one._rows.tolist() == other._rows.tolist()
        assert set(fresh.val.labels.tolist()) == set(fresh.train.labels.tolist()) == {0, 1}


def test_one_readable_image_cannot_be_on_both_sides(tmp_path):
    paint(tmp_path, {"a": 10, "b": 10})
    for i in range(9):
        spoil(tmp_path / "b" / f"{i}.png")
    with pytest.raises(GreedyNASError, match="no readable image of class 'b' is left in the"):
        opened(tmp_path, 8, 3)
