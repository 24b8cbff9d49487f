"""Export of a trained network for other tools, in the formats of `greedynas.deploy.formats`.

The file of the reference precision is compared with PyTorch on real images. Every file is then measured: its accuracy
on the test images and its latency on one CPU thread. A finished export is reused as long as the weights are the same;
formats and precisions that are added later, even in another environment, join its files.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from greedynas.data.datasets import Data, open_data
from greedynas.data.loader import ImageSet
from greedynas.data.settings import DataOptions
from greedynas.deploy.formats import FORMATS
from greedynas.deploy.formats.format import CARD, Classifier, Conversion, Format, make_format
from greedynas.deploy.timing import take_turns
from greedynas.models.model_file import WEIGHTS, Card, load_network
from greedynas.rundir.arch_file import read_arch
from greedynas.rundir.run_directory import NAME
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import write_json
from greedynas.runtime.rng import stream
from greedynas.runtime.text import logger
from greedynas.stages.export_files import (
    RECORD,
    SCHEMA_VERSION,
    STAGING,
    Converted,
    Timing,
    check_names,
    check_precisions,
    digest_of,
    file_facts,
    finished_export,
    in_order,
    missing_precisions,
    move,
    publish,
    remove_old,
    reopened,
    this_machine,
)
from greedynas.stages.run import Run, refuse_moved

DEFAULT_FORMATS = ("onnx", "safetensors")
CHECKED = 100  # real images on which a file and PyTorch must agree
TOLERANCE = 1e-4  # in probabilities: both then predict the same class wherever the margin is more than twice this
CALIBRATION = 512  # training images of the int8 quantisation
CHUNK = 128  # images per batch
ROUNDS = 20  # of latency measurement
THREADS = 1


def export_stage(
    folder: Path,
    console: Console,
    *,
    model: str | None = None,
    formats: Sequence[str] = DEFAULT_FORMATS,
    precisions: Sequence[str] | None = None,
    data: Data | None = None,
    named: DataOptions | None = None,
) -> dict[str, Any]:
    """Export a trained network of a run.

    Args:
        folder: The run directory, or the folder of a network in it.
        console: Where progress is shown.
        model: The network's name in `models/`; by default the chosen network.
        formats: Names in `FORMATS`.
        precisions: Precisions that are wanted besides each format's reference; None: all.
        data: The images; by default those of the run.
        named: The data that the command line names, for a run whose images have moved.

    Returns:
        The content of `export.json`.

    Raises:
        GreedyNASError: The network or a format does not exist, a package is missing, the data does not fit the network,
            or the outputs of a file differ from PyTorch's.
    """
    wanted = [make_format(one) for one in formats]
    check_names(wanted)
    check_precisions(wanted, precisions)
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
        if result is None or any(missing_precisions(one, precisions, result) for one in wanted):
            asked = sorted({*formats, *(result or {}).get("formats", ())})
            check_names([FORMATS[one]() for one in asked])
            for one in wanted:  # before anything is removed
                one.check_packages(converting=bool(missing_precisions(one, precisions, result)))
            network, card = load_network(home / WEIGHTS)
            data = _read_data(run, card) if data is None else data.at_size(card.image_size)
            _check_data(data, card)
            run.check_data(data)
            if result is None:  # otherwise the files belong to these weights, and stay even if a new format fails
                remove_old(home, published)
            about = {"schema_version": SCHEMA_VERSION, "model": name, "weights": digest, "formats": asked}
            written = write_files(home, network, card, data, asked, console, precisions, result)
            result = {**about, **written}
            write_json(home / RECORD, result)
            logger.info("exported %s: %s", name, ", ".join(entry["file"] for entry in result["files"]))
        if published is not None:
            publish(home, published, result["formats"])
    return result


def write_files(
    home: Path,
    network: nn.Module,
    card: Card,
    data: Data,
    formats: Sequence[str],
    console: Console,
    precisions: Sequence[str] | None = None,
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Convert a network to the given formats and measure the files.

    Args:
        home: The folder of the network.
        network: The network, on the CPU and in evaluation mode.
        card: The card of the network.
        data: The images. Calibration and checks use the training images, accuracies the test images.
        formats: Names in `FORMATS`.
        console: Where progress is shown.
        precisions: Precisions that are wanted besides each format's reference; None: all.
        earlier: The content of `export.json`, whose files stay.

    Returns:
        The part of `export.json` that describes the files.
    """
    wanted = [FORMATS[name]() for name in formats]
    made = reopened(home, earlier)
    skipped: dict[str, str] = {entry["file"]: entry["why"] for entry in (earlier or {}).get("skipped", ())}
    cache: dict[str, Any] = {}
    shutil.rmtree(home / STAGING, ignore_errors=True)  # left by an export that was killed
    try:
        for format in wanted:
            missing = missing_precisions(format, precisions, earlier)
            if not missing or (earlier is not None and not format.is_installed(converting=True)):
                continue
            with console.status(f"exporting {card.name} to {format.name}"):
                converted, why = convert(home, format, network, card, data.train, missing, cache)
                made += converted
                skipped |= why
    finally:
        shutil.rmtree(home / STAGING, ignore_errors=True)
    cache.clear()
    for file, why_not in skipped.items():
        logger.info("%s is left out, this machine cannot make or run it: %s", file, why_not)
    if any(format.card != "inside" for format in wanted):
        write_json(home / CARD, card.model_dump(mode="json", exclude_none=True))
    with console.status(f"measuring the files of {card.name}"):
        test = data.test()
        untested = {one.file: one.classify for one in made if one.classify is not None and one.recorded is None}
        top1 = accuracies(untested, test)
        latency = latencies(home, made, data.train)
    files = [file_facts(home, one, top1.get(one.file), latency.get(one.file)) for one in made]
    files = in_order(files, (earlier or {}).get("files", ()), wanted)
    left_out = [{"file": file, "why": why_not} for file, why_not in skipped.items()]
    caveats = {key: value for key, value in data.caveats().items() if key in ("caveats", "withheld")}
    return {
        **this_machine(
            [FORMATS[name]() for name in {entry["format"]: 0 for entry in files} if name in FORMATS], earlier
        ),
        "threads": THREADS,
        "images": len(test),
        "files": files,
        "skipped": left_out,
        **caveats,
    }


def convert(
    home: Path,
    format: Format,
    network: nn.Module,
    card: Card,
    images: ImageSet,
    precisions: Sequence[str] | None = None,
    cache: dict[str, Any] | None = None,
) -> tuple[list[Converted], dict[str, str]]:
    """Convert a network to precisions of a format, and move each file into the network's folder once it is checked.

    Args:
        home: The folder of the network.
        format: The format.
        network: The network, on the CPU and in evaluation mode.
        card: The card of the network.
        images: Training images.
        precisions: Some of the format's precisions; None: all.
        cache: Intermediate results that the formats of one export share.

    Returns:
        The converted files, and by file name the reason why a file was left out that this machine cannot make or run.

    Raises:
        GreedyNASError: The reference precision cannot be made, or its outputs differ from PyTorch's.
    """
    rows = images.balanced(min(CALIBRATION, len(images)), stream(images.view.seed, "images that calibrate int8"))
    source = Conversion(
        network, card, lambda: (batch for batch, _ in _batches(images, rows)), {} if cache is None else cache
    )
    made, skipped = [], {}
    for precision in format.precisions if precisions is None else precisions:
        try:
            made.append(_convert_one(home, format, precision, source, images))
        except Exception as error:  # converters raise errors of any class
            if isinstance(error, OSError) and error.errno is not None:
                raise  # caused by the machine, such as a full disk
            why = " ".join(str(error).split())[:300] or type(error).__name__
            if precision != format.reference:  # the other files do not need this one
                skipped[format.file_name(precision)] = why
            elif isinstance(error, GreedyNASError | MemoryError):
                raise
            else:
                logger.info("%s cannot be converted to %s", card.name, format.name, exc_info=True)
                raise GreedyNASError(f"{card.name} cannot be converted to {format.name}: {why}") from error
    return made, skipped


def _convert_one(home: Path, format: Format, precision: str, source: Conversion, images: ImageSet) -> Converted:
    name = format.file_name(precision)
    if name == WEIGHTS:  # the weights are the source of the export and exist already
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
            raise GreedyNASError("its outputs are not finite")
    for part in (*format.companions(precision), name):
        move(staging / part, home / part)
    return Converted(format, precision, classify, agrees)


def check_agreement(network: nn.Module, classify: Classifier, images: ImageSet, file: str) -> dict[str, Any]:
    """Compare the outputs of a file with PyTorch's on real images, in batches of 1 and of 32.

    Args:
        network: The network in PyTorch.
        classify: The function that runs the file.
        images: The images.
        file: The name of the file, for the message.

    Returns:
        The number of images and the largest difference in probability.

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
    if not worst <= TOLERANCE:  # true for NaN as well
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


def latencies(home: Path, made: Sequence[Converted], images: ImageSet) -> dict[str, Timing]:
    """Return the latency of each file, for one image on one thread.

    The files take turns, so that a change in the load of the machine affects all of them.
    """
    image = images.eval_batch([0])[0].cpu().contiguous()
    found = {one.file: one.format.runner(home / one.file, image, THREADS) for one in made if one.classify is not None}
    runners = {file: runner for file, runner in found.items() if runner is not None}
    if not runners:
        return {}
    medians = take_turns(list(runners.values()), ROUNDS)
    return {file: Timing.of(row) for file, row in zip(runners, medians, strict=True)}


def _batches(images: ImageSet, rows: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of evaluation inputs and labels on the CPU."""
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
        normalised=(card.mean, card.std),
        seed=config.seed,
        folder=run.folder,
    )


def _check_data(data: Data, card: Card) -> None:
    view = data.train.view
    if (view.size, view.channels) != (card.image_size, card.image_channels):
        raise GreedyNASError(
            f"{card.name} takes images of {card.image_size} px with {card.image_channels} channels, but the data has "
            f"{view.size} px and {view.channels} channels"
        )
    if list(card.class_names) != data.class_names:
        raise GreedyNASError(
            f"{card.name} was trained for {len(card.class_names)} classes ({', '.join(card.class_names[:3])}…), "
            f"but the data has {len(data.class_names)} ({', '.join(data.class_names[:3])}…)"
        )
