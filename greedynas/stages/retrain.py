"""Retraining in a run directory: it writes a trained network and its results on the test set to `models/NAME`.

The files are written in an order from which every interrupted retraining can resume: `retrain.json` (the request),
checkpoints, `model.safetensors`, `test.json`, `arch.json`, and then the copies of the chosen network's at the top of
the run.
"""

import math
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from greedynas.data.class_weights import balanced_weights, macro_accuracy
from greedynas.data.copies import withheld_sentence
from greedynas.data.datasets import Data
from greedynas.data.loader import ImageSet
from greedynas.data.settings import DataOptions
from greedynas.models.base_blocks import Resize
from greedynas.models.bases.linear_head import fit_classifier
from greedynas.models.losses import classification_loss
from greedynas.models.model_file import Card, load_network, save_network
from greedynas.rundir.arch_file import read_arch
from greedynas.rundir.callbacks import make_callbacks
from greedynas.rundir.run_directory import NAME, differences
from greedynas.rundir.schemas import VERSIONS, Finished, Top, read_record
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.files import read_json, write_atomically, write_json
from greedynas.runtime.memory import suggesting_what_fits, training_trial
from greedynas.runtime.parallel import ranks
from greedynas.runtime.text import logger
from greedynas.settings.recipes import RECIPES, ResolvedRecipe
from greedynas.settings.schema import RetrainSettings
from greedynas.stages.network_choice import Target, choose_target, found_targets, make_arch, make_card, start_network
from greedynas.stages.network_training import RetrainState, retrain
from greedynas.stages.recipes import make_recipe
from greedynas.stages.run import Run, choose_precisions, read_run_data, set_up
from greedynas.stages.testing import assess, predict_logits, top_accuracy

__all__ = ["report_retraining", "retrain", "retrain_stage"]

SCHEMA_VERSION = VERSIONS["retrain"]
FINETUNE = "finetune"  # the recipe of networks with pretrained weights
FREE = {"checkpoint_minutes", "checkpoint_steps", "log_every"}  # settings that do not change the result


@dataclass(frozen=True)
class Job:
    """One retraining with its settings, data and device."""

    run: Run
    home: Path  # models/NAME
    data: Data
    device: torch.device
    precision: str
    seed: int
    settings: RetrainSettings
    recipe: ResolvedRecipe
    teacher: nn.Module | None
    console: Console
    teacher_precision: str | None = None  # None: the precision of the training
    images: ImageSet | None = None  # that are trained on; None: the training and the validation images

    @property
    def trained_on(self) -> ImageSet:
        """The images that the network is trained on."""
        if self.images is not None:
            return self.images
        return self.data.train if self.settings.hold_out else self.data.train_and_val()


def retrain_stage(
    folder: Path,
    console: Console,
    *,
    settings: RetrainSettings,
    model: str | None = None,
    arch: str | None = None,
    name: str | None = None,
    pretrained: str | Path | None = None,
    seed: int | None = None,
    latency_table: Path | None = None,
    data: Data | None = None,
    named: DataOptions | None = None,
) -> dict[str, Any]:
    """Train and test a network of a run, or resume its training, and return the summary that `--json` prints.

    The network is `model` (a folder in models/) or `arch` (a known network, a path, `timm:NAME`, `random`), by default
    the chosen one. A finished model is left unchanged, and the test set is evaluated once, after the training. `random`
    draws a network within the budget of the search that found `model` or the chosen network; if that search limits
    latency, its table is the run's own or `latency_table`.
    """
    with Run.open(folder, named) as run:
        config = run.config()
        seed = config.seed if seed is None else seed
        recipe = make_recipe(settings)
        target = choose_target(folder, config, model, arch, name, pretrained, seed, latency_table)
        home = folder / "models" / target.name
        request = make_request(target, settings, recipe, seed)
        check_request(home, target, request)
        test = ranks.on_first(lambda: finished_test(home, recipe))
        if not test:
            device = set_up(config)
            data = data or read_run_data(run, config, device)
            run.check_data(data)
            precision, eval_precision = choose_precisions(config, device)
            teacher = load_teacher(folder, settings.teacher, target.name, data, device)
            job = Job(run, home, data, device, precision, seed, settings, recipe, teacher, console, eval_precision)
            test = train_and_test(job, target, request)
        arch_now = ranks.on_first(lambda: publish(folder, target.name, test["arch"] | results_of(test, settings)))
    return {**arch_now, "test_images": test["images"], "test_loss": test["loss"], "seconds": test["seconds"]}


def train_and_test(job: Job, target: Target, request: dict[str, Any]) -> dict[str, Any]:
    """Train a network, write `model.safetensors` and return the content of `test.json`."""
    home, data, recipe = job.home, job.data, job.recipe
    card = make_card(target, data)
    arch = make_arch(target, card)
    network = begin(job, target)  # errors are raised before anything is written
    home.mkdir(parents=True, exist_ok=True)
    write_json(home / "retrain.json", request)
    if not (home / "arch.json").exists():
        write_json(home / "arch.json", arch)
    if job.settings.top > 1:
        best = best_of_top(job, target)
        if best.path != target.path:
            target, card = best, make_card(best, data)
            arch, network = make_arch(target, card), begin(job, target)
    images = job.trained_on
    lengths = f"{recipe.name}, {recipe.epochs} epochs of {len(images):,} images in batches of {recipe.batch_size}"
    logger.info("retraining %s: %s; %s", target.name, lengths, asdict(recipe))
    job.console.print(f"Retraining {target.name}: {lengths}", highlight=False, markup=False)
    network, state = fit(job, network, card, images, recipe, home, target.name)
    save_network(home / "model.safetensors", network, card)

    def evaluate_on_test() -> dict[str, Any]:
        test = finished_test(home, recipe)
        if not test:
            logger.info("%s: evaluating on the test set", target.name)
            seen = data.at_size(card.image_size)
            with job.console.status(f"testing {target.name}"):
                test = assess(network, seen.test(), data.class_names, job.seed) | seen.caveats()
            test |= {"epochs": recipe.epochs, "seconds": state.seconds, "arch": arch}
            write_json(home / "test.json", test)
        return test

    return ranks.on_first(evaluate_on_test)


def finished_test(home: Path, recipe: ResolvedRecipe) -> dict[str, Any]:
    """Return the content of `test.json`, or an empty dict if it is of other epochs or the weights are missing."""
    test = read_record(home / "test.json", Finished)
    return test if test.get("epochs") == recipe.epochs and (home / "model.safetensors").is_file() else {}


def begin(job: Job, target: Target) -> nn.Module:
    card = make_card(target, job.data)
    settings, recipe = job.settings, job.recipe
    network = start_network(target, card, job.run, seed=job.seed, dropout=recipe.dropout, inherit=settings.inherit)
    network.to(job.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if target.pretrained is not None and recipe.name == FINETUNE:
        images = job.trained_on
        fit_classifier(network, images, job.data.weights_for(images))
    return network


def fit(
    job: Job, network: nn.Module, card: Card, images: ImageSet, recipe: ResolvedRecipe, folder: Path, title: str
) -> tuple[nn.Module, RetrainState]:
    """Train a network on images, which are resized for it if the run has larger ones: its teacher sees those."""
    if card.image_size != images.view.size:
        sized = nn.Sequential(Resize(card.image_size), network)
        trained, state = _fit(job, sized, images, recipe, folder, title)
        return trained[1], state  # type: ignore[index]
    return _fit(job, network, images, recipe, folder, title)


def _fit(
    job: Job, network: nn.Module, images: ImageSet, recipe: ResolvedRecipe, folder: Path, title: str
) -> tuple[nn.Module, RetrainState]:
    trial = training_trial(network, images.view.channels, images.view.size, job.device, job.precision)
    lower = (
        "stop other programs on the device"
        if job.teacher is None
        else "the teacher needs memory too; use a smaller one"
    )
    with suggesting_what_fits("retrain.batch_size", recipe.batch_size, trial, lower):
        return retrain(
            network,
            images,
            recipe,
            seed=job.seed,
            precision=job.precision,
            folder=folder,
            class_weights=job.data.weights_for(images),
            teacher=job.teacher,
            teacher_precision=job.teacher_precision,
            sync_bn=job.settings.sync_bn,
            console=job.console,
            title=title,
            validation=job.data.val if images is job.data.train else None,
            callbacks=make_callbacks(job.run.config().callbacks if ranks.is_first() else ()),
        )


def load_teacher(folder: Path, name: str | None, student: str, data: Data, device: torch.device) -> nn.Module | None:
    """Load a trained network of this run by its name in models/ or in timm; return None without a name."""
    if name is None:
        return None
    teacher, card = load_network(find_teacher(folder, name, student))
    view = data.train.view
    if list(card.class_names) != data.class_names or (card.image_size, card.image_channels) != (
        view.size,
        view.channels,
    ):
        raise GreedyNASError(f"the teacher {name!r} was trained for other classes or other images than this run has")
    return teacher.to(device, memory_format=torch.channels_last).requires_grad_(False)  # type: ignore[call-overload]


def find_teacher(folder: Path, name: str, student: str | None = None) -> Path:
    """Return the weights file of a network of this run, except the student, by its name in models/ or in timm."""
    names = [name, f"timm-{name}", f"timm-{name}-pretrained"]
    files = [folder / "models" / one / "model.safetensors" for one in names if NAME.fullmatch(one) and one != student]
    for file in files:
        if file.is_file():
            return file
    raise GreedyNASError(
        f"the teacher {name!r} is not trained in this run; train it first with greedynas retrain {folder} --arch timm:NAME, "
        "or let greedynas run --teacher NAME train it"
    )


# The request


def make_request(target: Target, settings: RetrainSettings, recipe: ResolvedRecipe, seed: int) -> dict[str, Any]:
    top = {"top": settings.top, "top_epochs": top_epochs(settings, recipe)} if settings.top > 1 else {"top": 1}
    return {
        "schema_version": SCHEMA_VERSION,
        "network": target.identity(),
        "recipe": {key: value for key, value in asdict(recipe).items() if key not in FREE},
        "inherit": settings.inherit,
        "teacher": settings.teacher,
        **top,
        **({"sync_bn": True} if settings.sync_bn else {}),
        **({"hold_out": True} if settings.hold_out else {}),
        "seed": seed,
    }


def check_request(home: Path, target: Target, request: dict[str, Any]) -> None:
    """Refuse other settings under the name of a model, with a list of them.

    More epochs are allowed where the epochs that were trained would have been the same.
    """
    if target.search is None and request["top"] > 1:
        raise GreedyNASError(f"{target.name} was not found by a search, so retrain.top has nothing to choose from")
    if request["teacher"] == target.name:
        raise GreedyNASError(f"{target.name} cannot be its own teacher")
    before = read_json(home / "retrain.json")
    if not before:
        if (home / "arch.json").exists():
            existing = read_arch(home.parents[1], home.name)
            identity = {key: existing.get(key) for key in target.identity()}
            if identity != target.identity():
                raise GreedyNASError(f"{home} holds another network; choose another --name")
        return
    if not isinstance(before.get("recipe"), dict):
        raise GreedyNASError(f"{home / 'retrain.json'} is malformed; remove {home} to train that network again")
    changed = differences(before, request)
    extensible = RECIPES[request["recipe"]["name"]].extensible  # a cosine schedule would differ from the first step
    if (
        set(changed) == {"recipe.epochs"}
        and extensible
        and _fewer(before["recipe"]["epochs"], request["recipe"]["epochs"])
    ):
        return
    if changed:
        raise GreedyNASError(
            f"{home} was started with other settings: {'; '.join(changed.values()):.600}. "
            "Give this network another --name, or use the same settings"
        )


def _fewer(before: Any, now: int) -> bool:
    return isinstance(before, int) and before < now


# The best of several


def top_epochs(settings: RetrainSettings, recipe: ResolvedRecipe) -> int:
    return settings.top_epochs or max(1, recipe.epochs // 10)


def best_of_top(job: Job, target: Target) -> Target:
    """Train each of the N best found networks for a few epochs and return the best one.

    They are trained on the training images and compared by accuracy on the validation images. Finished candidates are
    kept in `top.json`.
    """
    candidates = found_targets(job.run.folder, target)[: job.settings.top]
    recipe = job.recipe.shortened(top_epochs(job.settings, job.recipe))
    results = ranks.on_first(lambda: read_record(job.home / "top.json", Top).get("candidates", []))
    for candidate in candidates[len(results) :]:
        number = len(results) + 1
        title = f"{target.name}, {number} of {len(candidates)}"
        folder, card = job.home / "top" / str(number), make_card(candidate, job.data)
        network, state = fit(job, begin(job, candidate), card, job.data.train, recipe, folder, title)
        measured = ranks.on_first(partial(on_validation, network, job.data.at_size(card.image_size)))
        results.append({**make_arch(candidate, card), **measured, "epochs": recipe.epochs, "seconds": state.seconds})
        write_json(job.home / "top.json", {"schema_version": SCHEMA_VERSION, "candidates": results})
    ranks.on_first(lambda: shutil.rmtree(job.home / "top", ignore_errors=True))
    metric = "val_macro" if job.data.balanced else "val_top1"
    accuracies = [(result.get(metric, result["val_top1"]), -result.get("val_loss", math.inf)) for result in results]
    best = accuracies.index(max(accuracies))
    logger.info("of %d found networks, number %d is the best after %d epochs", len(results), best + 1, recipe.epochs)
    return candidates[best]


def on_validation(network: nn.Module, data: Data) -> dict[str, float]:
    """Return a network's top-1 accuracy, its average accuracy over classes and its loss on the validation images."""
    logits, labels = predict_logits(network, data.val)
    weights = balanced_weights(labels, logits.shape[1]) if data.balanced else None
    return {
        "val_top1": top_accuracy(logits, labels),
        "val_macro": macro_accuracy(logits.argmax(1) == labels, labels, logits.shape[1]),
        "val_loss": float(classification_loss(logits, labels, weights)),
    }


# Results


def results_of(test: dict[str, Any], settings: RetrainSettings) -> dict[str, Any]:
    """Return the results that retraining adds to `arch.json`, none of which depends on the clock."""
    results = {f"test_{key}": test.get(key) for key in ("top1", "top5", "macro")}
    results |= {"recipe": settings.recipe, "epochs": test["epochs"], "inherit": settings.inherit}
    if test.get("caveats"):  # next to the accuracies, so that a reader of this file alone sees them
        results |= {"test_caveats": test["caveats"], "test_withheld": test["withheld"]}
    return results if settings.teacher is None else {**results, "teacher": settings.teacher}


def publish(folder: Path, name: str, results: dict[str, Any]) -> dict[str, Any]:
    """Add the results to `arch.json`, copy the chosen network's files to the top of the run, and return `arch.json`."""
    home = folder / "models" / name
    arch = {**read_json(home / "arch.json"), **results}
    write_json(home / "arch.json", arch)
    if (folder / "arch.json").exists() and read_arch(folder)["model"] == name:
        for part in ("model.safetensors", "arch.json"):
            data = (home / part).read_bytes()
            if not (folder / part).exists() or (folder / part).read_bytes() != data:
                write_atomically(folder / part, data)
    return arch


def report_retraining(result: dict[str, Any], console: Console) -> None:
    table = Table(title="Retrained", title_justify="left")
    columns = ("model", "recipe", "epochs", "macs", "params", "top-1", "top-5", "macro", "seconds", "network")
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "recipe", "network") else "right")
    accuracies = [result["test_top1"], result["test_top5"], result["test_macro"]]
    withheld = result.get("test_withheld", False)
    table.add_row(
        Text(result["model"]),
        result["recipe"],
        str(result["epochs"]),
        f"{result['macs']:,}",
        f"{result['params']:,}",
        *("" if one is None else "withheld" if withheld else f"{one:.2%}" for one in accuracies),
        f"{result['seconds']:,.0f}",
        Text(f"timm's {result['timm']}" if "timm" in result else " ".join(result["ops"])),
    )
    table.caption = f"accuracy on {result['test_images']:,} test images, evaluated once after the training"
    console.print(table)
    print_caveats(result, console)


def print_caveats(result: dict[str, Any], console: Console) -> None:
    """Print the caveats of a model's accuracies, such as copies in the test set or missing classes."""
    caveats = list(result.get("test_caveats", ()))
    if result.get("test_withheld", False):
        caveats[:1] = [withheld_sentence(caveats)]
    for caveat in caveats:
        console.print(f"Warning: {caveat}", highlight=False, markup=False)
