"""Export of a trained network for other tools, in the formats of `greedynas.deploy.formats`.

The file of the reference precision is checked against PyTorch on real images; every file is then measured: its accuracy on
the test images, its latency on one CPU thread. What is finished is not done again as long as the weights are the same.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from greedynas.data.datasets import Data, open_data
from greedynas.data.loader import ImageSet
from greedynas.data.settings import Told
from greedynas.deploy.formats.format import CARD, Classifier, Conversion, Format, make_format
from greedynas.deploy.timing import quietest, take_turns
from greedynas.models.model_file import WEIGHTS, Card, load_network
from greedynas.rundir.arch_file import read_arch
from greedynas.rundir.run_directory import NAME
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import move_atomically, write_json
from greedynas.runtime.rng import stream
from greedynas.runtime.text import logger
from greedynas.stages.export_files import (
    RECORD,
    SCHEMA_VERSION,
    STAGING,
    Converted,
    check_names,
    digest_of,
    file_facts,
    finished_export,
    format_of_entry,
    publish,
    remove_old,
    this_machine,
)
from greedynas.stages.run import Run, refuse_moved

DEFAULT_FORMATS = ("onnx", "safetensors")
CHECKED = 100  # real images on which a file and PyTorch must agree
TOLERANCE = 1e-4  # in probabilities: then both name the same class wherever the margin is over twice that
CALIBRATION = 512  # training images of the int8 quantisation
CHUNK = 128  # images at a time
ROUNDS = 20  # of timing
THREADS = 1


def export_stage(
    folder: Path,
    console: Console,
    *,
    model: str | None = None,
    formats: Sequence[str] = DEFAULT_FORMATS,
    data: Data | None = None,
    named: Told | None = None,
) -> dict[str, Any]:
    """Export a trained network of a run.

    Args:
        folder: The run directory, or the folder of the network in it.
        console: Where progress is shown.
        model: The network's name in `models/`; the chosen one if not given.
        formats: Names in `FORMATS`.
        data: The images; those of the run if not given.
        named: The data that the user has named, where that of the run has moved.

    Returns:
        What `export.json` holds.

    Raises:
        GreedyNASError: There is no such network or format, a package is missing, the data is not that of the network, or a
            file does not compute what PyTorch computes.
    """
    check_names([make_format(wanted) for wanted in formats])
    if model is None and folder.resolve().parent.name == "models" and not (folder / "config.yaml").exists():
        folder, model = folder.resolve().parents[1], folder.resolve().name
    with Run.open(folder, named) as run:
        chosen = read_arch(folder)["model"] if (folder / "arch.json").exists() or model is None else ""
        name = model or chosen
        home = folder / "models" / name
        if not NAME.fullmatch(name) or not (home / WEIGHTS).is_file():
            raise GreedyNASError(f"{folder} has no trained network {name!r}; train it with greedynas retrain {folder}")
        published = folder if name == chosen else None
        digest = digest_of(home / WEIGHTS)
        result = finished_export(home, digest)
        if result is None or not set(formats) <= set(result["formats"]):
            asked = sorted({*formats, *(result or {}).get("formats", ())})
            check_names([make_format(one) for one in asked])  # before anything is removed
            network, card = load_network(home / WEIGHTS)
            data = data or _read_data(run, card)
            _check_data(data, card)
            run.check_data(data)
            if result is None:  # else these files are of the same weights: should a new format fail, they stay
                remove_old(home, published)
            about = {"schema_version": SCHEMA_VERSION, "model": name, "weights": digest, "formats": asked}
            result = {**about, **write_files(home, network, card, data, asked, console)}
            write_json(home / RECORD, result)
            logger.info("exported %s: %s", name, ", ".join(entry["file"] for entry in result["files"]))
        if published is not None:
            publish(home, published, result["formats"])
    return result


def write_files(
    home: Path, network: nn.Module, card: Card, data: Data, formats: Sequence[str], console: Console
) -> dict[str, Any]:
    """Write the files of these formats and measure them.

    Args:
        home: The folder of the network.
        network: The network, on the CPU and in evaluation mode.
        card: The card of the network.
        data: The images: for calibration and checks those of training, for the accuracy those of the test.
        formats: Names in `FORMATS`.
        console: Where progress is shown.

    Returns:
        What `export.json` says of the files.
    """
    wanted = [make_format(name) for name in formats]
    made: list[Converted] = []
    skipped: dict[str, str] = {}
    shutil.rmtree(home / STAGING, ignore_errors=True)  # of an export that was killed
    try:
        for format in wanted:
            with console.status(f"exporting {card.name} to {format.name}"):
                converted, why = convert(home, format, network, card, data.train)
                made += converted
                skipped |= why
    finally:
        shutil.rmtree(home / STAGING, ignore_errors=True)
    for file, why_not in skipped.items():
        logger.info("%s is left out, this machine cannot make or run it: %s", file, why_not)
    if any(format.card != "inside" for format in wanted):
        write_json(home / CARD, card.model_dump(mode="json", exclude_none=True))
    with console.status(f"measuring the files of {card.name}"):
        test = data.test()
        top1 = accuracies({one.file: one.classify for one in made if one.classify is not None}, test)
        latency = latencies(home, made, data.train)
    files = [file_facts(home, one, top1.get(one.file), latency.get(one.file)) for one in made]
    left_out = [{"file": file, "why": why_not} for file, why_not in skipped.items()]
    caveats = {key: value for key, value in data.caveats().items() if key in ("caveats", "withheld")}
    return {
        **this_machine(wanted),
        "threads": THREADS,
        "images": len(test),
        "files": files,
        "skipped": left_out,
        **caveats,
    }


def convert(
    home: Path, format: Format, network: nn.Module, card: Card, images: ImageSet
) -> tuple[list[Converted], dict[str, str]]:
    """Convert a network to all precisions of a format. A file is put into the folder of the network when it is checked.

    Args:
        home: The folder of the network.
        format: The format.
        network: The network, on the CPU and in evaluation mode.
        card: The card of the network.
        images: Training images.

    Returns:
        The files, and why files are left out that this machine cannot make or run, by name.

    Raises:
        GreedyNASError: The reference precision cannot be made, or does not compute what PyTorch computes.
    """
    rows = images.balanced(min(CALIBRATION, len(images)), stream(images.view.seed, "images that calibrate int8"))
    source = Conversion(network, card, lambda: (batch for batch, _ in _batches(images, rows)))
    made, skipped = [], {}
    for precision in format.precisions:
        try:
            made.append(_convert_one(home, format, precision, source, images))
        except Exception as error:  # of libraries, for any network
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the machine's: a full disk
            why = " ".join(str(error).split())[:300] or type(error).__name__
            if precision != format.reference:  # the other files are as good without this one
                skipped[format.file_name(precision)] = why
            elif isinstance(error, GreedyNASError | MemoryError):
                raise
            else:
                logger.info("%s cannot be converted to %s", card.name, format.name, exc_info=True)
                raise GreedyNASError(f"{card.name} cannot be converted to {format.name}: {why}") from error
    return made, skipped


def _convert_one(home: Path, format: Format, precision: str, source: Conversion, images: ImageSet) -> Converted:
    name = format.file_name(precision)
    if name == WEIGHTS:  # they are what is exported
        return Converted(format, precision, format.open(home / name))
    staging = home / STAGING
    staging.mkdir(exist_ok=True)
    format.convert(source, precision, staging / name)
    classify = format.open(staging / name)
    agrees = None
    if classify is not None:
        if precision == format.reference and not format.is_pytorch:
            agrees = check_agreement(source.network, classify, images, name)
        elif not classify(next(source.calibration())).isfinite().all():
            raise GreedyNASError("its results are not finite")
    for part in (*format.companions(precision), name):
        move_atomically(staging / part, home / part)
    return Converted(format, precision, classify, agrees)


def check_agreement(network: nn.Module, classify: Classifier, images: ImageSet, file: str) -> dict[str, Any]:
    """Compare a file with PyTorch on real images, one at a time and 32 together.

    Args:
        network: The network in PyTorch.
        classify: What runs the file.
        images: The images.
        file: The name of the file, for the message.

    Returns:
        The number of images, and the largest difference of a probability.

    Raises:
        GreedyNASError: The difference is larger than TOLERANCE.
    """
    rows = images.balanced(min(CHECKED, len(images)), stream(images.view.seed, "images that check an export"))
    batch = images.eval_batch(rows)[0].cpu()
    with torch.inference_mode():
        expected = network(batch).softmax(1)
    differences = [
        float((torch.cat([classify(part) for part in batch.split(size)]).softmax(1) - expected).abs().max())
        for size in (1, 32)
    ]
    worst = max(differences)
    if not worst <= TOLERANCE:  # also where it is no number
        raise GreedyNASError(
            f"{file} differs from PyTorch by {worst:.2g} in probabilities ({TOLERANCE:g} is allowed) and is not "
            "written; please report this network"
        )
    return {"images": len(rows), "max_difference": worst}


def accuracies(classifiers: Mapping[str, Classifier], images: ImageSet) -> dict[str, float]:
    """Return the top-1 accuracy of each classifier, in one pass over the images."""
    hits = dict.fromkeys(classifiers, 0)
    if not classifiers:
        return {}
    for batch, labels in _batches(images, np.arange(len(images))):
        for name, classify in classifiers.items():
            hits[name] += int((classify(batch).argmax(1) == labels).sum())
    return {name: count / len(images) for name, count in hits.items()}


def latencies(home: Path, made: Sequence[Converted], images: ImageSet) -> dict[str, float]:
    """Return the milliseconds of each file for one image on one thread, when nothing disturbs; the files take turns."""
    image = images.eval_batch([0])[0].cpu().contiguous()
    found = {one.file: one.format.runner(home / one.file, image, THREADS) for one in made if one.classify is not None}
    runners = {file: runner for file, runner in found.items() if runner is not None}
    if not runners:
        return {}
    measured = quietest(take_turns(list(runners.values()), ROUNDS))
    return dict(zip(runners, measured.tolist(), strict=True))


def report_export(result: dict[str, Any], folder: Path, console: Console) -> None:
    """Print what was exported: a table of the files, and what was left out or not run."""
    table = Table(title=Text(f"Exported {result['model']}"), title_justify="left")
    for column in ("file", "precision", "size", "top-1", "latency"):
        table.add_column(column, justify="left" if column in ("file", "precision") else "right")
    for entry in result["files"]:
        latency = "" if entry.get("latency_ms") is None else f"{entry['latency_ms']:.3g} ms"
        size = f"{entry['bytes'] / 1e6:,.2f} MB"
        table.add_row(entry["file"], entry["precision"], size, _shown_top1(entry, result), latency)
    table.caption = (
        f"{result['images']:,} test images; one image on one thread of {result['machine']}{_timed_in(result)}, "
        "when it is quiet"
    )
    console.print(table)
    for told in result.get("caveats", ()):
        console.print(f"Warning: {told}", highlight=False, markup=False)
    for entry in result["skipped"]:
        console.print(f"left out: {entry['file']} ({entry['why']})", highlight=False, markup=False)
    for entry in result["files"]:
        if entry.get("top1") is None:
            console.print(f"converted, not run on this machine: {entry['file']}", highlight=False, markup=False)
        if entry.get("agrees"):
            images, worst = entry["agrees"]["images"], entry["agrees"]["max_difference"]
            told = f"{entry['file']} and PyTorch agree within {worst:.1g} in probabilities on {images} images"
            console.print(told, highlight=False, markup=False)
    console.print(f"written to {folder / 'models' / result['model']}", highlight=False, markup=False)


def _shown_top1(entry: dict[str, Any], result: dict[str, Any]) -> str:
    if entry.get("top1") is None:
        return "not run"
    return "withheld" if result.get("withheld") else f"{entry['top1']:.2%}"


def _timed_in(result: dict[str, Any]) -> str:
    """Return the runtimes of the latencies, for the caption."""
    timed = [format_of_entry(entry) for entry in result["files"] if entry.get("latency_ms") is not None]
    names = dict.fromkeys(format.runtime_name or format.name for format in timed if format is not None)
    return f" in {' or '.join(names)}" if names else ""


def _batches(images: ImageSet, rows: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs as the network evaluates them, and labels, on the CPU."""
    for chunk in np.split(rows, range(CHUNK, len(rows), CHUNK)):
        batch, labels = images.eval_batch(chunk)
        yield batch.cpu().contiguous(), labels.cpu()


# Data


def _read_data(run: Run, card: Card) -> Data:
    config = run.config()
    settings = run.image_settings()
    refuse_moved(settings.source, run.folder)
    return open_data(
        settings,
        image_size=card.image_size,
        image_channels=card.image_channels,
        seed=config.seed,
        folder=run.folder,
    )


def _check_data(data: Data, card: Card) -> None:
    view = data.train.view
    if (view.size, view.channels) != (card.image_size, card.image_channels):
        raise GreedyNASError(
            f"{card.name} takes images of {card.image_size} px with {card.image_channels} channels, the data has "
            f"{view.size} px and {view.channels}"
        )
    if list(card.class_names) != data.class_names:
        raise GreedyNASError(
            f"{card.name} was trained for {len(card.class_names)} classes ({', '.join(card.class_names[:3])}…), the data has "
            f"{len(data.class_names)} ({', '.join(data.class_names[:3])}…)"
        )
