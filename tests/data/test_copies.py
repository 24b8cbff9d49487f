"""An accuracy on images that were trained on is not presented as a result, from the first line to the report."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from greedynas.data.copies import WITHHELD_SHARE, Copies, caveats
from tests.helpers.pictures import opened, paint, picture
from tests.helpers.training import SETTINGS, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")


def write_config(file: Path, **data):
    settings = {
        "space": tiny_space(repeat=1).model_dump(mode="json"),
        "data": {"workers": 0, "pad": 1, "val_images": 9, **data},
        "train": {**SETTINGS, "max_epochs": 1},
        "search": {"population": 4, "generations": 2},
        "retrain": {"epochs": 1, "batch_size": 14},
    }
    file.write_text(yaml.safe_dump(settings))
    return file


def three_sets(root, test_classes=("a", "b", "c"), copies=0):
    paint(root / "train", {"a": 14, "b": 14, "c": 14}, size=(10, 9))
    paint(root / "test", dict.fromkeys(test_classes, 10), first=1, size=(10, 9))
    for i in range(copies):
        shutil.copy(root / "train" / "a" / f"{i}.png", root / "test" / "b" / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def tainted(tmp_path_factory):
    """Return the folder for a job whose test images are its training images, and a list for the output of the job."""
    place = tmp_path_factory.mktemp("tainted")
    paint(place / "photos" / "train", {"a": 14, "b": 14, "c": 14}, size=(10, 9))
    shutil.copytree(place / "photos" / "train", place / "photos" / "test")
    write_config(place / "tiny.yaml")
    return place, []


def call(run_cli, *command):
    code, out, err = run_cli(*command)
    assert code == 0, err
    return " ".join(out.split())


@pytest.fixture
def job(run_cli, tainted, monkeypatch):
    place, printed = tainted
    monkeypatch.chdir(place)
    if not printed:
        printed.append(call(run_cli, "run", "tiny.yaml", "--data", "photos", "--out", "run", "--flops", "60K"))
    return place / "run", printed[0]


COPIES = "42 of 42 test images are exact copies of training images"
ACCURACY = re.compile(r"\d\d?\d?\.\d+%")


def test_the_headline_is_withheld_if_test_images_are_training_images(job):
    _, out = job
    found = out[out.index("Found:") :]
    assert found.startswith("Found: a network with ")
    assert (
        "Warning: The accuracy on the test set is withheld, because it says nothing about new images: " + COPIES
        in found
    )
    assert not ACCURACY.search(found)
    retrained = out[out.index("Retrained") : out.index("Exported")]
    assert COPIES in retrained
    exported = out[out.index("Exported") : out.index("Found:")]
    assert COPIES in exported
    for part in (retrained, exported):
        assert "withheld" in part
        assert not ACCURACY.search(part)


def test_files_have_the_caveat_with_their_numbers(job):
    run, _ = job
    test = json.loads((run / "models" / "macs-60K" / "test.json").read_text())
    assert (test["copies"], test["images"], test["withheld"]) == (42, 42, True)
    assert test["caveats"][0].startswith(COPIES)
    for file in (run / "arch.json", run / "models" / "macs-60K" / "arch.json"):
        arch = json.loads(file.read_text())
        assert arch["test_withheld"] is True
        assert arch["test_caveats"] == test["caveats"]
    export = json.loads((run / "models" / "macs-60K" / "export.json").read_text())
    assert (export["caveats"], export["withheld"]) == (test["caveats"], True)


def test_the_report_withholds_the_accuracy(job, run_cli):
    run, _ = job
    page = (run / "report.html").read_text()
    page = page[page.index("<body") :]
    text = re.sub(r"<(script|style|svg)\b.*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)
    assert "test accuracy is withheld" in text
    assert text.count(COPIES) >= 4  # at the top, with the test, the tables and the files
    test = json.loads((run / "models" / "macs-60K" / "test.json").read_text())
    shown = f"{100 * test['top1']:.1f}%"
    before_settings = text[: text.index("Settings and versions")]
    on_the_supernet = f"{100 * json.loads((run / 'arch.json').read_text())['supernet_accuracy']:.1f}%"
    assert shown == on_the_supernet or shown not in before_settings
    code, out, _ = run_cli("report", run, "--json")
    facts = json.loads(out[out.index("{") :])
    assert code == 0
    assert "withheld" in facts["headline"]
    assert COPIES in facts["caveats"][0]


def test_a_relative_name_of_the_data_works_from_every_directory(job, run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, origin = shutil.copytree(job[0], tmp_path / "run"), job[0].parent
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["source"] == str(origin / "photos")
    call(run_cli, "search", run, "--flops", "70K", "--name", "elsewhere", "--set", "generations=1")


@pytest.mark.parametrize(
    "command",
    [
        ("search", "--flops", "50K", "--name", "late"),
        ("retrain", "--name", "late"),
        ("export", "--model", "macs-60K"),
        ("train",),
    ],
)
def test_every_stage_refuses_changed_images(job, run_cli, tmp_path, command):
    """Check a finished run: `search`, `retrain` and `export` may be called days later."""
    run = shutil.copytree(job[0], tmp_path / "run")
    photos = shutil.copytree(job[0].parent / "photos", tmp_path / "photos")
    settings = (run / "config.yaml").read_text().replace(str(job[0].parent / "photos"), str(photos))
    (run / "config.yaml").write_text(settings)
    (run / "models" / "macs-60K" / "export.json").unlink()
    picture(77, (10, 9)).save(photos / "test" / "c" / "5.png")
    verb, *options = command
    options = ["--out", run, *options] if verb == "train" else options
    code, _, err = run_cli(verb, run / "config.yaml" if verb == "train" else run, *options)
    assert code == 2
    assert err.startswith(f"error: test/c/5.png has changed: the images are not those that {run} was started with")
    assert err.count("\n") == 1


def test_moved_images_must_be_named(job, run_cli, tmp_path):
    run = shutil.copytree(job[0], tmp_path / "run")
    shutil.copytree(job[0].parent / "photos", tmp_path / "moved")
    settings = (run / "config.yaml").read_text().replace(str(job[0].parent / "photos"), str(tmp_path / "photos"))
    (run / "config.yaml").write_text(settings)
    search = ("search", run, "--flops", "50K", "--name", "late", "--set", "generations=1")
    code, _, err = run_cli(*search)
    assert code == 2
    assert "are not in" in err
    assert "repeat its train (or run) command with --data and their new folder" in err
    call(run_cli, "train", run / "config.yaml", "--data", tmp_path / "moved", "--out", run)
    call(run_cli, *search)


# Counting copies


@pytest.mark.parametrize(("copies", "withheld"), [(0, False), (2, False), (3, True)])
def test_an_accuracy_is_withheld_from_a_tenth_of_copies_on(tmp_path, copies, withheld):
    data = opened(three_sets(tmp_path, copies=copies), 8, 3)
    found = data.caveats()
    assert (found["copies"], found["withheld"]) == (copies, withheld)
    assert len(found["caveats"]) == (copies > 0)
    assert WITHHELD_SHARE == 0.1  # the value in docs/guide/your-images.md


def test_a_class_that_the_test_set_lacks_is_named(tmp_path):
    data = opened(three_sets(tmp_path, test_classes=("a", "b")), 8, 3)
    assert "the test set has no image of class 'c'" in data.notes
    found = data.caveats()
    assert found["absent_classes"] == ["c"]
    assert found["caveats"] == ["the test set has no image of class 'c': nothing is known about it"]
    assert found["withheld"] is False


def test_few_copies_and_absent_classes_are_shown_with_the_accuracy(run_cli, tmp_path):
    three_sets(tmp_path / "photos", test_classes=("a", "b"), copies=1)
    config = write_config(tmp_path / "tiny.yaml", source=str(tmp_path / "photos"))
    run = tmp_path / "run"
    assert "the test set has no image of class 'c'" in call(run_cli, "train", config, "--out", run)
    call(run_cli, "search", run, "--flops", "60K")
    out = call(run_cli, "retrain", run)
    test = json.loads((run / "models" / "macs-60K" / "test.json").read_text())
    assert f"{test['top1']:.2%}" in out
    assert "Warning: 1 of 20 test images are exact copies of training images" in out
    assert "Warning: the test set has no image of class 'c': nothing is known about it" in out
    assert test["withheld"] is False
    code, out, _ = run_cli("report", run, "--json")
    facts = json.loads(out[out.index("{") :])
    assert code == 0
    assert "top-1 on test images" in facts["headline"]
    assert [caveat[:11] for caveat in facts["caveats"]] == ["1 of 20 tes", "The test se"]


def test_a_copy_of_a_validation_image_counts(tmp_path):
    three_sets(tmp_path)
    paint(tmp_path / "val", {"a": 4, "b": 4, "c": 4}, first=2, size=(10, 9))
    shutil.copy(tmp_path / "val" / "c" / "1.png", tmp_path / "test" / "c" / "1.png")
    assert opened(tmp_path, 8, 3).caveats()["copies"] == 1


def test_copies_are_described_in_a_sentence():
    none = Copies(0, 10)
    assert none.sentence() == "no test image is an exact copy of a training image"
    assert not none.withheld
    assert not Copies(0, 0).withheld
    some = Copies(1, 1000, "test/x", "train/y", unread=2, first_unread="z")
    assert some.sentence().startswith(
        "1 of 1,000 test images are exact copies of training images, the first: test/x of train/y;"
    )
    assert some.sentence().endswith("2 files cannot be read and were not compared, the first: z")
    assert caveats(None, []) == {"copies": None, "absent_classes": [], "caveats": [], "withheld": False}


# The location of a run


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("photos/run", "lies inside of --data"),
        ("photos", "lies inside of --data"),
        ("photos/train/a/run", "lies inside of --data"),
        ("link/run", "lies inside of --data"),
        ("nowhere/../photos/run", "lies inside of --data"),
        (".", "lies inside of --out"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "run"])
def test_a_run_inside_of_the_images_is_refused_before_anything_is_written(run_cli, tmp_path, out, message, verb):
    three_sets(tmp_path / "photos")
    (tmp_path / "link").symlink_to("photos")
    config = write_config(tmp_path / "tiny.yaml")
    before = sorted(tmp_path.rglob("*"))
    budget = ["--flops", "60K"] if verb == "run" else []
    code, _, err = run_cli(verb, config, "--data", tmp_path / "photos", "--out", tmp_path / out, *budget)
    assert code == 2
    assert err.count("\n") == 1
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_images_beside_a_run_are_accepted(run_cli, tmp_path):
    three_sets(tmp_path / "photos")
    (tmp_path / "photos-run").mkdir()  # the name has the same beginning
    config = write_config(tmp_path / "tiny.yaml")
    call(run_cli, "train", config, "--data", tmp_path / "photos", "--out", tmp_path / "photos-run")
