"""Publish a trained network: make a folder with everything that timm, PyTorch and people need, and upload it."""

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from greedynas.deploy.formats.pt2_format import export_program
from greedynas.hub.model_card import Statements, model_card
from greedynas.models.model_file import WEIGHTS, Card, load_network
from greedynas.models.timm_models import save_timm_config
from greedynas.reporting.facts import Facts, Model, read_facts
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import write_atomically
from greedynas.runtime.packages import require_packages
from greedynas.spaces.drawing import draw_path

REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
PROGRAM = "model.pt2"
HTTP_LIBRARIES = ("httpx", "httpcore", "requests", "urllib3")  # newer ones are called httpx2 and httpcore2
PUBLISHED = ("README.md", "config.json", WEIGHTS, PROGRAM, "network.svg", "*.onnx")


def check_repository(name: str) -> str:
    """Return the name of a repository if it has the form USER/NAME, and refuse it otherwise."""
    if not REPOSITORY.fullmatch(name) or ".." in name or "--" in name:
        raise GreedyNASError(f"{name!r} is not a repository of the hub: write USER/NAME, such as ada/photos")
    return name


def push(
    folder: Path,
    repository: str,
    *,
    model: str | None = None,
    said: Statements | None = None,
    private: bool = False,
    upload: bool = True,
) -> dict[str, Any]:
    """Publish a trained network of a run on the hub.

    The token is the one of huggingface_hub (`hf auth login`, or HF_TOKEN); it is neither read nor stored here.

    Args:
        folder: The run directory.
        repository: The repository, as USER/NAME; it is created if it does not exist.
        model: A network in `models/`; by default the chosen one.
        said: The user's statements on licences.
        private: Whether a new repository is private.
        upload: False: the folder `hub/NAME` of the run is made, and nothing is uploaded.

    Returns:
        The repository, the folder, its files, and the address (None without an upload).

    Raises:
        GreedyNASError: There is no such trained network, or the hub refuses the upload.
    """
    check_repository(repository)
    require_packages("push", {"huggingface_hub": "huggingface_hub"})
    facts = read_facts(folder)
    published = _model(facts, model)
    home = make_folder(facts, published, repository, said or Statements())
    files = sorted(file.name for file in home.iterdir())
    address = None
    if upload:
        from huggingface_hub import HfApi

        api = HfApi(library_name="greedynas")
        with hub_errors(repository):
            api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repository, folder_path=home, commit_message="Add model", allow_patterns=list(PUBLISHED)
            )
        address = f"{api.endpoint}/{repository}"
    return {"run": str(folder), "repository": repository, "folder": str(home), "files": files, "address": address}


def _model(facts: Facts, name: str | None) -> Model:
    found = facts.chosen if name is None else next((one for one in facts.models if one.name == name), None)
    if found is None:
        names = ", ".join(one.name for one in facts.models) or "none yet"
        raise GreedyNASError(f"{facts.folder} has no network {name or 'that a search chose'}; its networks: {names}")
    if found.test is None:
        raise GreedyNASError(f"{found.name} is not trained yet: greedynas retrain {facts.folder} --model {found.name}")
    return found


def make_folder(facts: Facts, model: Model, repository: str, said: Statements) -> Path:
    """Make the folder that is uploaded, `hub/NAME` in the run, and return it."""
    source = facts.folder / "models" / model.name
    network, card = load_network(source)
    home = facts.folder / "hub" / model.name
    try:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        for file in (source / WEIGHTS, *sorted(source.glob("*.onnx"))):
            shutil.copyfile(file, home / file.name)
        save_timm_config(card, home / "config.json")
        _save_program(network, card, home / PROGRAM)
        if card.space is not None and card.path is not None:
            write_atomically(home / "network.svg", draw_path(card.path, card.space, title=card.name).encode())
        text = model_card(facts, model, card, repository, said)
        write_atomically(home / "README.md", text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise GreedyNASError(f"cannot write {error.filename or home}: {error.strerror}") from None
    return home


def _save_program(network: nn.Module, card: Card, file: Path) -> None:
    """Save a network as a program of torch.export, which plain PyTorch runs without the code of greedynas."""
    images = torch.zeros(2, card.image_channels, card.image_size, card.image_size)
    torch.export.save(export_program(network, images), file)


@contextmanager
def hub_errors(repository: str) -> Iterator[None]:
    """Replace the errors of huggingface_hub by one line, which contains no header and no token."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    except RepositoryNotFoundError:
        raise GreedyNASError(
            f"the hub has no repository {repository}, or it is private: check the name, and log in with hf auth login"
        ) from None
    except HfHubHTTPError as error:
        code = getattr(error.response, "status_code", None)
        advice = "log in with hf auth login, or set HF_TOKEN" if code in (401, 403) else "try again later"
        raise GreedyNASError(f"the hub refused {repository} (HTTP {code}): {advice}") from None
    except (LocalEntryNotFoundError, OSError) as error:
        raise GreedyNASError(f"the hub cannot be reached ({type(error).__name__}): check the network") from None
    except Exception as error:
        # Of the HTTP library, whose errors do not share a base with the above.
        if not type(error).__module__.startswith(HTTP_LIBRARIES):
            raise
        raise GreedyNASError(f"the hub cannot be reached ({type(error).__name__}): check the network") from None
