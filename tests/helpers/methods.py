"""Test helpers shared by `tests.studies.test_methods` and others."""

from pathlib import Path

import yaml

from tests.helpers.training import SETTINGS, tiny_space

SMALL = {
    "data": {"val_images": 12, "test_images": 6, "workers": 0, "pad": 1},
    "train": SETTINGS,
    "search": {"population": 6, "generations": 3},
    "retrain": {"epochs": 2, "batch_size": 16, "lr": 0.1},
}


def write_config(file: Path, **more) -> Path:
    config = {**SMALL, "space": tiny_space().model_dump(mode="json"), **more}
    file.write_text(yaml.safe_dump(config))
    return file
