"""Publish and fetch networks: the verbs `push` and `pull`."""

from pathlib import Path
from typing import Annotated

import typer

from greedynas.cli.commands import make_app, option, switch, verb
from greedynas.cli.options import NETWORK, OUTPUT, JsonOption, ModelOption, RunArgument, print_json
from greedynas.runtime.terminal import say

PANEL = "Runs"

app = make_app()

RepositoryArgument = Annotated[str, typer.Argument(metavar="USER/NAME", help="A repository of the Hugging Face hub.")]


@verb(app, "greedynas push runs/photos ada/photos --data-license MIT", panel=PANEL)
def push(
    run: RunArgument,
    repository: RepositoryArgument,
    model: ModelOption = None,
    license: Annotated[
        str, option("--license", "NAME", "Licence of the weights, as the hub abbreviates it.", NETWORK)
    ] = "other",
    data_license: Annotated[
        str, option("--data-license", "TEXT", "Licence of the training images, for the model card.", NETWORK)
    ] = "",
    private: Annotated[bool, switch("--private", "Make a new repository private.", OUTPUT)] = False,
    dry_run: Annotated[
        bool, switch("--dry-run", "Make the folder DIR/hub to look at, and upload nothing.", OUTPUT)
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Publish a trained network on the Hugging Face hub.

    The repository gets a model card, the weights as safetensors, the exported ONNX files, and a config.json with which
    timm builds the network. Log in with hf auth login, or set HF_TOKEN.
    """
    from greedynas.hub import publishing
    from greedynas.hub.model_card import Statements

    said = Statements(license, data_license)
    result = publishing.push(run, repository, model=model, said=said, private=private, upload=not dry_run)
    if as_json:
        print_json(result)
    elif result["address"] is None:
        say(f"made {result['folder']} ({', '.join(result['files'])}); nothing was uploaded")
    else:
        say(f"published {', '.join(result['files'])} at {result['address']}")


@verb(app, "greedynas pull ada/photos --out models/photos", panel=PANEL)
def pull(
    repository: RepositoryArgument,
    out: Annotated[Path | None, option("--out", "DIR", "Write to this folder. By default, NAME.", OUTPUT)] = None,
    revision: Annotated[
        str | None, option("--revision", "NAME", "A branch, a tag or a commit of the repository.", NETWORK)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a published network from the Hugging Face hub."""
    from greedynas.hub import fetching
    from greedynas.hub.publishing import check_repository

    folder = out or Path(check_repository(repository).partition("/")[2])
    result = fetching.pull(repository, folder, revision=revision)
    if as_json:
        print_json(result)
    else:
        say(f"fetched {', '.join(result['files'])} into {result['folder']}")
        say(f"Next: greedynas predict {result['folder']} IMAGE")
