"""Export of a trained network for other tools: ONNX in fp32, fp16 and int8, and safetensors with its card as JSON.

The fp32 file is checked against PyTorch on real images; every file is then measured: its accuracy on the test images, its
latency on one CPU thread. What is finished is not done again as long as the weights are the same.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from greedynas.data.datasets import Data, open_data
from greedynas.data.loader import ImageSet
from greedynas.data.settings import Told
from greedynas.deploy.latency_measurement import cpu_name, quietest, take_turns
from greedynas.deploy.onnx_checks import check_onnx, open_session
from greedynas.deploy.onnx_files import make_onnx, onnx_runner, run_session, to_fp16, to_int8
from greedynas.models.model_file import WEIGHTS, Card, load_network
from greedynas.rundir.arch_file import read_arch
from greedynas.rundir.run_directory import NAME
from greedynas.rundir.schemas import Exported, read_record
from greedynas.runtime.errors import GreedyNASError, unknown
from greedynas.runtime.files import write_atomically, write_json
from greedynas.runtime.rng import stream
from greedynas.runtime.text import logger
from greedynas.stages.run import Run, refuse_moved

if TYPE_CHECKING:
    import onnx

SCHEMA_VERSION = 1
FORMATS = ("onnx", "safetensors")
ONNX = {"fp32": "model.onnx", "fp16": "model.fp16.onnx", "int8": "model.int8.onnx"}
RECORD, CARD = "export.json", "model.json"
CHECKED = 100  # real images on which ONNX Runtime and PyTorch must agree
TOLERANCE = 1e-4  # in probabilities: then both name the same class wherever the margin is over twice that
CALIBRATION = 512  # training images of the int8 quantisation
CHUNK = 128  # images at a time
ROUNDS = 20  # of timing

Classifier = Callable[[Tensor], Tensor]  # a batch of inputs -> logits


def export_stage(
    folder: Path,
    console: Console,
    *,
    model: str | None = None,
    formats: Sequence[str] = FORMATS,
    data: Data | None = None,
    named: Told | None = None,
) -> dict[str, Any]:
    """Export a trained network of a run, the chosen one if none is named; returns what `export.json` holds."""
    for wanted in formats:
        if wanted not in FORMATS:
            raise unknown("format", wanted, list(FORMATS))
    if model is None and folder.resolve().parent.name == "models" and not (folder / "config.yaml").exists():
        folder, model = folder.resolve().parents[1], folder.resolve().name
    with Run.open(folder, named) as run:
        chosen = read_arch(folder)["model"] if (folder / "arch.json").exists() or model is None else ""
        name = model or chosen
        home = folder / "models" / name
        if not NAME.fullmatch(name) or not (home / WEIGHTS).is_file():
            raise GreedyNASError(f"{folder} has no trained network {name!r}; train it with greedynas retrain {folder}")
        published = folder if name == chosen else None
        digest = _digest(home / WEIGHTS)
        result = _finished(home, digest)
        if result is None or not set(formats) <= set(result["formats"]):
            asked = sorted({*formats, *(result or {}).get("formats", ())})
            network, card = load_network(home / WEIGHTS)
            data = data or _read_data(run, card)
            _check_data(data, card)
            run.check_data(data)
            _remove_old(home, published)
            about = {"schema_version": SCHEMA_VERSION, "model": name, "weights": digest, "formats": asked}
            result = {**about, **write_files(home, network, card, data, asked, console)}
            write_json(home / RECORD, result)
            logger.info("exported %s: %s", name, ", ".join(entry["file"] for entry in result["files"]))
        if published is not None:
            _publish(home, published, result["formats"])
    return result


def write_files(
    home: Path, network: nn.Module, card: Card, data: Data, formats: Sequence[str], console: Console
) -> dict[str, Any]:
    """The files of these formats, and what is measured of them."""
    models: dict[str, onnx.ModelProto] = {}
    agrees: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    classifiers: dict[str, Classifier] = {}
    if "onnx" in formats:
        with console.status(f"exporting {card.name} to ONNX"):
            models["fp32"] = make_onnx(network, card)
            agrees = check_agreement(network, models["fp32"], data.train)
            converted, skipped = convert(models["fp32"], card, data.train)
            models |= converted
    for precision, model in models.items():
        write_atomically(home / ONNX[precision], model.SerializeToString(deterministic=True))
        classifiers[ONNX[precision]] = _in_onnx(model)
    for precision, why in skipped.items():
        logger.info("%s is left out, this machine cannot make or run it: %s", ONNX[precision], why)
    if "safetensors" in formats:
        write_json(home / CARD, card.model_dump(mode="json", exclude_none=True))
        classifiers[WEIGHTS] = _in_torch(network)
    with console.status(f"measuring the files of {card.name}"):
        test = data.test()
        top1 = accuracies(classifiers, test)
        latency = latencies(models, data.train)
    files = []
    for file in classifiers:
        precision = next((precision for precision in models if ONNX[precision] == file), "fp32")
        size = (home / file).stat().st_size
        facts = {"file": file, "precision": precision, "bytes": size, "sha256": _digest(home / file)}
        facts |= {"top1": top1[file], "latency_ms": latency[precision] if file != WEIGHTS else None}
        files.append(facts | ({"agrees": agrees} if file == ONNX["fp32"] else {}))
    left_out = [{"file": ONNX[precision], "why": why} for precision, why in skipped.items()]
    caveats = {key: value for key, value in data.caveats().items() if key in ("caveats", "withheld")}
    return {**_here(), "threads": 1, "images": len(test), "files": files, "skipped": left_out, **caveats}


def check_agreement(network: nn.Module, model: "onnx.ModelProto", images: ImageSet) -> dict[str, Any]:
    """How far ONNX Runtime is from PyTorch on real images, one at a time and 32 together; too far is an error."""
    rows = images.balanced(min(CHECKED, len(images)), stream(images.view.seed, "images that check an export"))
    batch = images.eval_batch(rows)[0].cpu()
    expected = _in_torch(network)(batch).softmax(1)
    classify = _in_onnx(model)
    differences = [
        float((torch.cat([classify(part) for part in batch.split(size)]).softmax(1) - expected).abs().max())
        for size in (1, 32)
    ]
    worst = max(differences)
    if not worst <= TOLERANCE:  # also where it is no number
        raise GreedyNASError(
            f"the ONNX file differs from PyTorch by {worst:.2g} in probabilities ({TOLERANCE:g} is allowed) and is not "
            "written; please report this network"
        )
    return {"images": len(rows), "max_difference": worst}


def convert(
    model: "onnx.ModelProto", card: Card, images: ImageSet
) -> tuple[dict[str, "onnx.ModelProto"], dict[str, str]]:
    """The model in lower precisions, and why one of them cannot be made or run here."""
    made, skipped = {}, {}
    rows = images.balanced(min(CALIBRATION, len(images)), stream(images.view.seed, "images that calibrate int8"))
    makers: dict[str, Callable[[], onnx.ModelProto]] = {
        "fp16": lambda: to_fp16(model, card),
        "int8": lambda: to_int8(model, card, (batch.numpy() for batch, _ in _batches(images, rows))),
    }
    for precision, make in makers.items():
        try:
            candidate = make()
            check_onnx(candidate, ONNX[precision])
            if not _in_onnx(candidate)(next(_batches(images, rows))[0]).isfinite().all():
                raise GreedyNASError("its results are not finite")
            made[precision] = candidate
        except Exception as error:  # of two libraries, for any network; the other files are as good without this one
            skipped[precision] = " ".join(str(error).split())[:300] or type(error).__name__
    return made, skipped


def accuracies(classifiers: Mapping[str, Classifier], images: ImageSet) -> dict[str, float]:
    """Top-1 of each, in one pass over the images."""
    hits = dict.fromkeys(classifiers, 0)
    for batch, labels in _batches(images, np.arange(len(images))):
        for name, classify in classifiers.items():
            hits[name] += int((classify(batch).argmax(1) == labels).sum())
    return {name: count / len(images) for name, count in hits.items()}


def latencies(models: Mapping[str, "onnx.ModelProto"], images: ImageSet) -> dict[str, float]:
    """Milliseconds for one image on one thread, when nothing disturbs; the models take turns."""
    if not models:
        return {}
    image = images.eval_batch([0])[0].cpu().contiguous()
    measured = quietest(take_turns([onnx_runner(model, image, 1) for model in models.values()], ROUNDS))
    return dict(zip(models, measured.tolist(), strict=True))


def report_export(result: dict[str, Any], folder: Path, console: Console) -> None:
    table = Table(title=Text(f"Exported {result['model']}"), title_justify="left")
    for column in ("file", "precision", "size", "top-1", "latency"):
        table.add_column(column, justify="left" if column in ("file", "precision") else "right")
    for entry in result["files"]:
        latency = "" if entry.get("latency_ms") is None else f"{entry['latency_ms']:.3g} ms"
        size = f"{entry['bytes'] / 1e6:,.2f} MB"
        top1 = "withheld" if result.get("withheld") else "" if entry.get("top1") is None else f"{entry['top1']:.2%}"
        table.add_row(entry["file"], entry["precision"], size, top1, latency)
    table.caption = f"{result['images']:,} test images; one image on one thread of {result['machine']} in ONNX Runtime, when it is quiet"
    console.print(table)
    for told in result.get("caveats", ()):
        console.print(f"Warning: {told}", highlight=False, markup=False)
    for entry in result["skipped"]:
        console.print(f"left out: {entry['file']} ({entry['why']})", highlight=False, markup=False)
    for entry in result["files"]:
        if entry.get("agrees"):
            images, worst = entry["agrees"]["images"], entry["agrees"]["max_difference"]
            told = f"{entry['file']} and PyTorch agree within {worst:.1g} in probabilities on {images} images"
            console.print(told, highlight=False, markup=False)
    console.print(f"written to {folder / 'models' / result['model']}", highlight=False, markup=False)


# What runs a batch


def _in_onnx(model: "onnx.ModelProto") -> Classifier:
    session = open_session(model.SerializeToString())
    return lambda batch: torch.from_numpy(run_session(session, batch))


def _in_torch(network: nn.Module) -> Classifier:
    @torch.inference_mode()
    def classify(batch: Tensor) -> Tensor:
        return network(batch)

    return classify


def _batches(images: ImageSet, rows: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs as the network evaluates them, and labels, on the CPU."""
    for chunk in np.split(rows, range(CHUNK, len(rows), CHUNK)):
        batch, labels = images.eval_batch(chunk)
        yield batch.cpu().contiguous(), labels.cpu()


# Files


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


def _here() -> dict[str, str]:
    """What decides whether a precision can be run, and how fast."""
    import onnxruntime

    return {"machine": cpu_name(), "runtime": f"onnxruntime {onnxruntime.__version__}"}


def _finished(home: Path, digest: str) -> dict[str, Any] | None:
    """An earlier export of the same weights, if all that it says is still there; what it left out elsewhere may work here."""
    try:
        result = read_record(home / RECORD, Exported)
        ours = result["schema_version"] == SCHEMA_VERSION and result["weights"] == digest
        if not ours or not {entry["file"] for entry in result["files"]} <= {WEIGHTS, *ONNX.values()}:
            return None  # of other weights, or not written by us
        if not set(result["formats"]) <= set(FORMATS) or result["model"] != home.name:
            return None
        card = "safetensors" not in result["formats"] or (home / CARD).is_file()
        files = (_digest(home / entry["file"]) == entry["sha256"] for entry in result["files"])
        here = not result["skipped"] or _here().items() <= result.items()
        return result if card and here and all(files) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, GreedyNASError):
        return None


def _remove_old(home: Path, published: Path | None) -> None:
    """Files of other weights: they must not stay where the new ones fail."""
    for name in (RECORD, *ONNX.values()):
        (home / name).unlink(missing_ok=True)
    if published is not None:
        (published / ONNX["fp32"]).unlink(missing_ok=True)


def _publish(home: Path, folder: Path, formats: Sequence[str]) -> None:
    """The chosen network's files lie at the top of the run as well."""
    files = {"onnx": ONNX["fp32"], "safetensors": WEIGHTS}
    for name in (files[name] for name in formats):
        if not (folder / name).is_file() or _digest(folder / name) != _digest(home / name):
            write_atomically(folder / name, (home / name).read_bytes())


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
