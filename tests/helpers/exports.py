"""Helpers of tests: shared by `tests.stages.test_export` and others."""

import io

import pytest
from rich.console import Console

from greedynas.data.settings import DataSettings
from greedynas.runtime.files import write_json
from greedynas.settings.schema import Config
from greedynas.stages.export import export_stage
from greedynas.stages.run import Run
from tests.helpers.model_files import SE, make_card, save_trained

QUIET = Console(file=io.StringIO(), width=140)


def make_run(folder, photos, card=None):
    """A run whose chosen network, `best`, is trained."""
    settings = DataSettings(source=str(photos), workers=0, pad=1, val_images=12, test_images=6)
    Run.start(folder, Config(name="tiny", space=SE, device="cpu", data=settings)).close()
    card = card or make_card()
    save_trained(folder / "models" / "best" / "model.safetensors", card)
    write_json(folder / "arch.json", {"model": "best"})
    return folder


@pytest.fixture(scope="session")
def exported(photos, tmp_path_factory):
    """An exported run; tests leave it as it is."""
    folder = make_run(tmp_path_factory.mktemp("exported"), photos)
    export_stage(folder, QUIET)
    return folder
