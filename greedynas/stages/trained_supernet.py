"""The supernet of a run, restored from its newest checkpoint to search it, and whether it is fully trained."""

from pathlib import Path

import torch
from torch import Tensor

from greedynas.data.datasets import Data
from greedynas.greedy.state import TrainState
from greedynas.models.supernet import Supernet
from greedynas.rundir.checkpoints import Checkpoint, Checkpoints, checkpoint_errors, load_weights, net_weights
from greedynas.runtime.errors import GreedyNASError
from greedynas.runtime.text import epochs
from greedynas.settings.schema import Config
from greedynas.stages.run import Run, choose_precisions, read_run_config, read_run_data, set_up, supernet_of


def load_supernet(
    run: Run, config: Config, data: Data | None = None, now: bool = False
) -> tuple[Supernet, TrainState, Data, str]:
    """Return the trained supernet of a run, its state, its data, and the precision to evaluate in.

    With `now`, it may be one that is not fully trained.
    """
    tensors, state = _finished_checkpoint(run.load_checkpoint(), config, run.folder, now)
    device = set_up(config)
    data = data or read_run_data(run, config, device)
    run.check_data(data)
    net = _with_weights(config, tensors, len(data.class_names), device, run.folder)
    return net, state, data, choose_precisions(config, device)[1]


def supernet_in(folder: Path, device: torch.device) -> Supernet:
    """Return the trained supernet of a run directory, without taking its lock or reading its images."""
    config = read_run_config(folder)
    tensors, _ = _finished_checkpoint(Checkpoints(folder / "supernet").load(), config, folder)
    classifier = tensors.get("net.classifier.weight")
    classes = config.space.num_classes if classifier is None else len(classifier)
    return _with_weights(config, tensors, classes, device, folder)


def _finished_checkpoint(
    checkpoint: Checkpoint | None, config: Config, folder: Path, now: bool = False
) -> tuple[dict[str, Tensor], TrainState]:
    """Return the tensors and the state of a checkpoint; refuse one of an unfinished training, except with `now`."""
    if checkpoint is None:
        raise GreedyNASError(f"{folder} has no supernet yet; train one with greedynas train")
    with checkpoint_errors(folder / "supernet"):
        state = TrainState.from_json(checkpoint[1], config.space)
    if state.stopped is None and not now:
        raise GreedyNASError(
            f"the supernet in {folder} is not fully trained (step {state.step}); repeat its train command to resume it, "
            "or search it as it is with greedynas search --now"
        )
    return checkpoint[0], state


def unfinished_step(folder: Path, config: Config) -> int | None:
    """Return the step of the newest checkpoint if the supernet is not fully trained, else None."""
    state = _finished_checkpoint(Checkpoints(folder / "supernet").load(), config, folder, now=True)[1]
    return state.step if state.stopped is None else None


def unfinished_sentence(epoch: int, step: int) -> str:
    """Return the sentence that goes with the results of a search on an unfinished supernet."""
    return (
        f"The supernet is not fully trained: this search uses its checkpoint after step {step:,} ({epochs(epoch)}). "
        "Accuracies and the choice will differ once it is."
    )


def _with_weights(
    config: Config, tensors: dict[str, Tensor], num_classes: int, device: torch.device, folder: Path
) -> Supernet:
    net = supernet_of(config, num_classes, device)
    with checkpoint_errors(folder / "supernet"):
        load_weights(net, net_weights(tensors))
    return net
