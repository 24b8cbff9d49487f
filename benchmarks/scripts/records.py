"""The paths of the recorded results that other scripts read."""

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RECORDS = Path(__file__).parents[1] / "records"
MACRO = RECORDS / "macro-h200-2026-11-16"
METHODS = RECORDS / "methods-h200-2026-11-17"
ABLATION = RECORDS / "ablation-h200-2026-11-17"


@contextmanager
def tuning_data() -> Iterator[Path]:
    """Unpack the data of the tuning rounds to a temporary folder, which is removed on exit."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(RECORDS / "tuning.tar.xz") as archive:
        archive.extractall(folder, filter="data")
        yield Path(folder) / "tuning"
