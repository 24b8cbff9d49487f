"""Fetch a published network from the hub and check it: nothing that it contains is executed."""

from pathlib import Path
from typing import Any

from greedynas.hub.publishing import check_repository, hub_errors
from greedynas.models.model_file import WEIGHTS, load_network
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.packages import require_packages

# Not the program of torch.export: greedynas does not need it.
FETCHED = ("README.md", "config.json", WEIGHTS, "network.svg", "*.onnx")


def pull(repository: str, folder: Path, *, revision: str | None = None) -> dict[str, Any]:
    """Fetch a network that `push` has published, and check that its weights fit its architecture.

    Args:
        repository: The repository, as USER/NAME.
        folder: A new folder for its files, or one that an earlier call has made.
        revision: A branch, a tag or a commit; by default the newest one.

    Returns:
        The repository, the folder, its files, the classes and the image size.

    Raises:
        GreedyNASError: There is no such repository, or it holds no network of greedynas.
    """
    check_repository(repository)
    require_packages("pull", {"huggingface_hub": "huggingface_hub"})
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / "config.json").is_file())):
        raise GreedyNASError(f"{folder} is not empty; choose another --out")
    from huggingface_hub import snapshot_download

    with hub_errors(repository):
        snapshot_download(repository, revision=revision, local_dir=folder, allow_patterns=list(FETCHED))
    if not (folder / WEIGHTS).is_file():
        raise GreedyNASError(f"{repository} holds no network of greedynas: it has no {WEIGHTS}")
    _, card = load_network(folder / WEIGHTS)
    return {
        "repository": repository,
        "folder": str(folder),
        "files": sorted(file.name for file in folder.iterdir() if file.is_file()),
        "classes": list(card.class_names),
        "image_size": card.image_size,
    }
