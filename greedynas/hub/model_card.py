"""The model card of a published network: README.md with metadata, figures, limits, and how the network was found."""

from dataclasses import dataclass, replace
from typing import Any

import yaml

from greedynas._version import __version__
from greedynas.models.model_file import Card
from greedynas.reporting import story
from greedynas.reporting.cells import Table
from greedynas.reporting.facts import Facts, Model
from greedynas.reporting.tables import export_table, shown_accuracy
from greedynas.reporting.worth import worth
from greedynas.runtime.text import clean, count

MOST_CLASSES = 50  # that are listed
_ESCAPED = str.maketrans({**{mark: f"\\{mark}" for mark in "\\`*_[]|#!~"}, "<": "&lt;", ">": "&gt;", "&": "&amp;"})


@dataclass(frozen=True)
class Statements:
    """What only the user knows about a network.

    Attributes:
        license: The licence of the weights, as the hub abbreviates it, such as "apache-2.0".
        data_license: The licence or the terms of the training images, in the user's words; empty: unknown.
    """

    license: str = "other"
    data_license: str = ""


def model_card(facts: Facts, model: Model, card: Card, repository: str, said: Statements) -> str:
    """Return the text of README.md: YAML metadata, and Markdown in which everything from the run is plain text.

    Args:
        facts: The facts of the run.
        model: The network that is published.
        card: Its card.
        repository: The repository, as USER/NAME.
        said: The user's statements.

    Returns:
        The text, which states withheld accuracies and caveats as the report does.
    """
    head = yaml.safe_dump(_metadata(model, card, said), sort_keys=False, allow_unicode=True)
    parts = [
        f"# {_plain(repository.rpartition('/')[2])}",
        _summary(facts, model, card),
        "![The network, from the image at the top to the classifier](network.svg)" if card.space is not None else "",
        "## Figures\n\n" + _figures(model, card),
        "## How to use it\n\n" + _usage(model, repository),
        "## How it was found\n\n" + _plain(story.headline(facts).lead if model is facts.chosen else _given(model)),
        "## Limits\n\n" + _limits(facts, model, card, said),
        "## Classes\n\n" + _classes(card),
        f"Made with greedynas {__version__} (GreedyNAS, You et al., CVPR 2020).",
    ]
    return f"---\n{head}---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _metadata(model: Model, card: Card, said: Statements) -> dict[str, Any]:
    metrics = []
    if model.test is not None and not model.test.withheld:
        value = round(model.test.top1, 4)
        task = {"type": "image-classification", "name": "Image classification"}
        metric = {"type": "accuracy", "value": value, "name": "top-1 on the held-out test images"}
        dataset = {"name": "the images of the run", "type": "imagefolder"}
        metrics = [{"name": card.name, "results": [{"task": task, "dataset": dataset, "metrics": [metric]}]}]
    return {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "license": said.license,
        "tags": ["image-classification", "timm", "greedynas", "neural-architecture-search"],
        **({"model-index": metrics} if metrics else {}),
    }


def _summary(facts: Facts, model: Model, card: Card) -> str:
    cost = "" if model.arch.macs is None else f" with {count(model.arch.macs)} multiply-adds"
    classes = f"{len(card.class_names):,} classes"
    text = f"An image classifier for {classes}{cost}, for images of {card.image_size} × {card.image_size} pixels."
    compared = worth(facts) if model is facts.chosen else None
    return _plain(text + (f" {compared}" if compared else ""))


def _figures(model: Model, card: Card) -> str:
    test, arch = model.test, model.arch
    rows = []
    if test is not None:
        rows.append(("top-1 on test images", shown_accuracy(test, test.top1)))
        rows += [("top-5 on test images", shown_accuracy(test, test.top5))] if test.top5 is not None else []
        rows += [("average over classes", shown_accuracy(test, test.macro)), ("test images", f"{test.images:,}")]
    rows += [("multiply-adds", f"{arch.macs:,}")] if arch.macs is not None else []
    rows += [("parameters", f"{arch.params:,}")] if arch.params is not None else []
    rows.append(("input", f"{card.image_channels} × {card.image_size} × {card.image_size}"))
    text = _markdown(Table(["", ""], [list(row) for row in rows]))
    export = model.export
    if test is not None and test.withheld and export is not None:
        export = export.model_copy(update={"withheld": True})
    files = export_table(replace(model, export=export))
    return text if files is None else f"{text}\n\n{_markdown(files)}\n\n{_plain(files.note)}"


def _usage(model: Model, repository: str) -> str:
    timm = f'model = timm.create_model("hf-hub:{repository}", pretrained=True).eval()'
    register = "import greedynas\n\ngreedynas.register_timm_models()\n" if model.arch.timm is None else "\n"
    plain = (
        "import torch\nfrom huggingface_hub import hf_hub_download\n\n"
        f'model = torch.export.load(hf_hub_download("{repository}", "model.pt2")).module()\n'
        "logits = model(images)  # (n, channels, height, width), normalised as config.json says"
    )
    return (
        f"With timm{' and greedynas' if model.arch.timm is None else ''}:\n\n```python\nimport timm\n{register}{timm}\n```\n\n"
        f"With PyTorch alone:\n\n```python\n{plain}\n```\n\n"
        f"From the command line: `greedynas pull {repository} --out model` and `greedynas predict model image.jpg`."
    )


def _given(model: Model) -> str:
    return f"The network {model.name} was given, not found by the search."


def _limits(facts: Facts, model: Model, card: Card, said: Statements) -> str:
    test = model.test
    lines = [
        "It knows only the classes below and gives every image one of them.",
        "Its accuracy was measured on images of the same source as the training images; on others it may be lower.",
        f"Licence of the training images, as stated by the publisher: {said.data_license or 'not stated'}.",
    ]
    lines += [] if test is None else [one if one.endswith(".") else f"{one}." for one in test.caveats]
    lines += ["The network was trained once; another seed gives another accuracy."]
    return "\n".join(f"- {_plain(line)}" for line in lines)


def _classes(card: Card) -> str:
    shown = ", ".join(_plain(name) for name in card.class_names[:MOST_CLASSES])
    more = len(card.class_names) - MOST_CLASSES
    return f"{shown}{f', and {more:,} more (in config.json)' if more > 0 else ''}"


def _markdown(table: Table) -> str:
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(cell if cell == "---" else _plain(cell) for cell in row) + " |" for row in rows)


def _plain(text: str) -> str:
    """Return text for Markdown in which nothing is a link, HTML or markup."""
    text = " ".join(clean(text).split()).translate(_ESCAPED)
    # Many renderers make links of bare addresses and of names after an @.
    return text.replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;")
