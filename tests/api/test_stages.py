"""Tests of the whole job from Python on images that are not on disk."""

import numpy as np
import pytest
import yaml

import greedynas
from tests.helpers.pictures import picture
from tests.helpers.training import SETTINGS, tiny_space

CHANGES = {"data.val_images": 9, "data.test_images": 6, "train.max_epochs": 1}


class Pictures:
    """A torch data set with 45 pictures of three classes."""

    classes = ("a", "b", "c")

    def __init__(self, first=0):
        self.first = first

    def __len__(self):
        return 45

    def __getitem__(self, index):
        return picture([self.first, index], (8, 8)), index % 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    file = tmp_path_factory.mktemp("settings") / "tiny.yaml"
    space = yaml.safe_load(tiny_space().to_yaml())
    file.write_text(yaml.safe_dump({"space": space, "device": "cpu", "train": SETTINGS}))
    return file


@pytest.fixture(scope="module")
def trained(settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return greedynas.train(settings, folder, data=Pictures(), changes=CHANGES, quiet=True)


def test_a_dataset_is_split_as_the_settings_say(trained):
    data = trained.data(source=Pictures())
    assert (len(data.train), len(data.val), len(data.test())) == (30, 9, 6)
    assert data.class_names == ["a", "b", "c"]


def test_later_stages_take_the_same_dataset(trained):
    run = greedynas.search_run(trained, data=Pictures(), changes={"population": 4, "generations": 2}, quiet=True)
    run = greedynas.retrain(run, data=Pictures(), changes={"epochs": 1, "batch_size": 10}, quiet=True)
    run = greedynas.export(run, data=Pictures(), formats=["safetensors"], quiet=True)
    assert run.stage == "exported"
    assert run.best.test.top1 == run.top1


def test_a_run_without_a_name_for_its_images_asks_for_them(trained):
    with pytest.raises(greedynas.GreedyNASError, match="pass the data set again as data="):
        greedynas.search_run(trained, quiet=True)


def test_another_dataset_is_refused(trained):
    with pytest.raises(greedynas.GreedyNASError, match="not those that"):
        trained.data(source=Pictures(first=1))


def test_auto_needs_images_with_a_name(tmp_path):
    with pytest.raises(greedynas.GreedyNASError, match="register_dataset"):
        greedynas.train("auto", tmp_path / "run", data=Pictures(), quiet=True)


def test_predict_takes_strings_and_a_single_image(exported, photos):
    file = sorted(photos.rglob("*.png"))[0]
    (one,) = greedynas.predict(str(exported), str(file), top=1)
    (same,) = greedynas.predict(exported, [file], top=1)
    assert one == same


def test_describe_returns_the_facts_that_the_command_prints():
    space = greedynas.load_space("macro")
    facts = greedynas.describe("macro", "22212202")
    assert facts == greedynas.describe(space, (2, 2, 2, 1, 2, 2, 0, 2))
    assert facts["macs"] == space.costs([facts["path"]]).macs[0]
    assert greedynas.describe("macro")["paths"] == 6561
    assert "mobilenet" in greedynas.describe()["spaces"]
    assert greedynas.describe(path="greedynas-a")["space"].startswith("mobilenet")
    assert np.isclose(sum(layer["macs"] for layer in facts["layers"]), facts["macs"])


def test_auto_resumes_a_run_with_objects_among_its_changes(photos, tmp_path):
    changes = {**CHANGES, "space": tiny_space(), "image_size": np.int64(8), "retrain.epochs": 1}
    first = greedynas.train("auto", tmp_path / "run", data=photos, changes=changes, quiet=True)
    again = greedynas.train("auto", tmp_path / "run", data=photos, changes=changes, quiet=True)
    assert again.config == first.config
    with pytest.raises(greedynas.GreedyNASError, match="was started with auto ") as refused:
        greedynas.train("auto", tmp_path / "run", data=photos, changes={**changes, "image_size": 9}, quiet=True)
    assert "image_size=9" in str(refused.value)
    assert "space=tiny" in str(refused.value)
    assert "stages" not in str(refused.value)  # the name is enough
