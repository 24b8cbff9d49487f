"""Test helpers shared by `tests.stages.test_export` and others."""

import io

from rich.console import Console

from greedynas.data.settings import DataSettings
from greedynas.runtime.files import write_json
from greedynas.settings.schema import Config
from greedynas.stages.run import Run
from tests.helpers.model_files import SE, make_card, save_trained

QUIET = Console(file=io.StringIO(), width=140)


def make_run(folder, photos, card=None):
    """Make a run whose chosen network, `best`, is trained; return its folder."""
    settings = DataSettings(source=str(photos), workers=0, pad=1, val_images=12, test_images=6)
    Run.start(folder, Config(name="tiny", space=SE, device="cpu", data=settings)).close()
    card = card or make_card()
    save_trained(folder / "models" / "best" / "model.safetensors", card)
    write_json(folder / "arch.json", {"model": "best"})
    return folder
