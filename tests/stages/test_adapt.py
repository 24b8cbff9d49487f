"""Tests of the fine-tuning of a pretrained network before a space around it is searched."""

import json
import shutil

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from greedynas.data.loader import ImageSet
from greedynas.data.settings import DataSettings
from greedynas.jobs.resolving import load_config
from greedynas.models.bases.linear_head import fit_classifier
from greedynas.models.bases.timm_bases import network_of_base
from greedynas.models.model_file import load_network
from greedynas.rundir.checkpoints import load_weights, net_weights
from greedynas.spaces.paths import most_expensive
from greedynas.stages import adapt
from greedynas.stages.adapt import adapted_network, begin_supernet
from greedynas.stages.run import Run, read_data, supernet_of
from greedynas.stages.testing import predict_logits, top_accuracy
from greedynas.stages.train import train_stage
from tests.helpers.base_runs import NAME, write_job
from tests.helpers.exports import QUIET
from tests.helpers.training import same_tensors, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def fine_tuned(file, folder):
    """Do the first step of a job alone; return the teacher, the images and the settings."""
    config = load_config(file)
    data = read_data(config, CPU)
    with Run.start(folder, config) as run:
        run.check_data(data)
        return adapted_network(run, config, data, CPU, "fp32", QUIET), data, config


def test_the_base_is_never_fitted_to_validation_or_test_images(tmp_path, monkeypatch):
    """Neither the head nor the fine-tuning: the validation images rank paths afterwards."""
    seen = []
    train, whole = ImageSet.train_batches, ImageSet.eval_batch

    def batches(images, *given, **named):
        for batch in train(images, *given, **named):
            seen.append(("train", batch[0].flatten(1)))
            yield batch

    def read(images, *given):
        batch = whole(images, *given)
        seen.append(("eval", batch[0].flatten(1)))
        return batch

    data = {"augment": "none", "flip": False}  # so that images can be recognised
    file = write_job(tmp_path, data=data, adapt={"epochs": 3})
    config = load_config(file)
    images = read_data(config, CPU)
    parts = {name: part.eval_batch()[0].flatten(1) for name, part in (("train", images.train), ("val", images.val))}
    monkeypatch.setattr(ImageSet, "train_batches", batches)
    monkeypatch.setattr(ImageSet, "eval_batch", read)
    with Run.start(tmp_path / "run", config) as run:
        adapted_network(run, config, images, CPU, "fp32", QUIET)
    first = min(place for place, (kind, _) in enumerate(seen) if kind == "train")
    fitted = torch.cat([batch for _, batch in seen[:first]])  # the features that the head is fitted to
    trained = torch.cat([batch for kind, batch in seen if kind == "train"])
    assert len(fitted) == 30
    assert len(trained) == 90  # three epochs of 30 images
    for batch in (fitted, trained):  # afterwards, an accuracy is measured on validation images and shown
        assert torch.cdist(batch, parts["train"]).min(1).values.max() < 0.1
        assert torch.cdist(batch, parts["val"]).min() > 1
    assert torch.cdist(parts["train"], trained).min(1).values.max() < 0.1  # and it was trained on all of these


def test_the_fine_tuned_base_is_a_model_of_the_run(base_job):
    file, run = base_job
    home, config = run / "models/base", load_config(file)
    network, card = load_network(home)
    arch, test = (json.loads((home / name).read_text()) for name in ("arch.json", "test.json"))
    assert (card.timm, card.class_names, card.image_size) == (NAME, ("a", "b", "c"), 24)
    assert (card.mean, card.std) == (config.space.mean, config.space.std)
    assert (arch["model"], arch["timm"], arch["pretrained"]) == ("base", NAME, config.weights)
    assert (arch["recipe"], arch["epochs"], arch["test_top1"]) == ("finetune", 2, test["top1"])
    logits, labels = predict_logits(network, read_data(config, CPU).test())
    assert test["images"] == 6
    assert test["top1"] == top_accuracy(logits, labels)
    assert arch["params"] == sum(parameter.numel() for parameter in timm.create_model(NAME, num_classes=3).parameters())
    space = config.space.adapt(num_classes=3)
    assert arch["macs"] == pytest.approx(int(space.costs([most_expensive(space)]).macs[0]), rel=0.01)
    assert json.loads((home / "retrain.json").read_text())["recipe"]["name"] == "finetune"


def test_fine_tuning_starts_from_the_fitted_head(tmp_path):
    """With a learning rate of nearly 0, the result is the pretrained network with that head."""
    file = write_job(tmp_path, adapt={"epochs": 1, "lr": 1e-12, "ema": 0.0})
    base, data, config = fine_tuned(file, tmp_path / "run")
    network = timm.create_model(NAME, num_classes=3)
    fitted = timm.create_model(NAME, num_classes=3)
    weights = load_file(config.weights)
    for one in (network, fitted):
        one.load_state_dict({**one.state_dict(), **{k: v for k, v in weights.items() if "classifier" not in k}})
    fit_classifier(fitted, data.train)
    assert base.classifier.weight.sub(fitted.classifier.weight).abs().max() < 1e-4
    assert base.classifier.weight.sub(network.classifier.weight).abs().max() > 0.1
    for name, value in base.named_parameters():
        assert torch.allclose(value, dict(fitted.named_parameters())[name], atol=1e-4), name
    assert not any(parameter.requires_grad for parameter in base.parameters())
    assert not base.training
    images, labels = data.train.eval_batch()
    fitted.eval()
    assert F.cross_entropy(fitted(images), labels) < 0.2  # of 30 images and 32 features


def test_the_supernet_starts_as_the_fine_tuned_base(tmp_path):
    base, data, config = fine_tuned(write_job(tmp_path), tmp_path / "run")
    net = supernet_of(config, 3, CPU)
    begin_supernet(net, base, data, config.seed)
    net.eval()
    images, _ = data.val.eval_batch()
    with torch.no_grad():
        difference = net(images, most_expensive(net.space)) - base(images)
    assert difference.abs().max() < 1e-4 * max(1.0, float(base(images).abs().max()))
    again = supernet_of(config, 3, CPU)
    begin_supernet(again, load_network(tmp_path / "run/models/base")[0], data, config.seed)
    assert same_tensors(net.state_dict(), again.state_dict())


def test_a_finished_base_is_not_trained_again(base_job, tmp_path, monkeypatch):
    file, run = base_job
    shutil.copytree(run, tmp_path / "run")
    before = (run / "models/base/model.safetensors").read_bytes()
    monkeypatch.setattr(adapt, "train_and_test", lambda *_: pytest.fail("it is trained again"))
    train_stage(load_config(file), tmp_path / "run", QUIET)
    assert (tmp_path / "run/models/base/model.safetensors").read_bytes() == before


def test_a_supernet_that_has_begun_does_not_start_anew(base_job, tmp_path):
    """Its weights are those of its checkpoint, not those of the base."""
    file, run = base_job
    shutil.copytree(run, tmp_path / "run")
    config = load_config(file)
    with Run.open(tmp_path / "run") as opened:
        tensors, state = opened.load_checkpoint()
    assert state["step"] == 6
    train_stage(config, tmp_path / "run", QUIET)
    with Run.open(tmp_path / "run") as opened:
        assert same_tensors(opened.load_checkpoint()[0], tensors)
    net, base = supernet_of(config, 3, CPU), load_network(run / "models/base")[0]
    load_weights(net, net_weights(tensors))
    whole = network_of_base(base, net.space)
    assert not torch.equal(net.head[0].conv.weight, whole.head[0].conv.weight)


# Weights that are not there, or not those of the base


def wrong_weights(kind, folder):
    file = folder / "wrong.safetensors"
    if kind == "of another network":
        save_file(timm.create_model("mobilenetv3_small_050").state_dict(), file)
    elif kind == "of other shapes":
        save_file(
            {k: v[:1].clone() if v.ndim > 1 else v for k, v in timm.create_model(NAME).state_dict().items()}, file
        )
    elif kind == "no weights at all":
        save_file({"x": torch.zeros(1)}, file)
    elif kind == "a folder":
        file.mkdir()
    elif kind == "text":
        file.write_text("weights")
    elif kind == "empty":
        file.touch()
    elif kind == "of the cache":
        return "cache"
    elif kind == "of a package":
        return "package"
    return str(file)


WRONG = {
    "of another network": "are not those of timm's",
    "of other shapes": "are not those of timm's",
    "no weights at all": "are not those of timm's",
    "a folder": "wrong.safetensors",
    "missing": "no such file of weights",
    "text": "is not a file of weights",
    "empty": "is not a file of weights",
    "of the cache": "timm has no pretrained weights for",
    "of a package": "no installed package has weights of",
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_weights_are_one_line_and_do_not_block_the_run(run_cli, tmp_path, kind):
    """The same directory then takes the right weights."""
    file = write_job(tmp_path)
    wrong = wrong_weights(kind, tmp_path)
    command = ("train", file, "--out", tmp_path / "run")
    code, _, errors = run_cli(*command, "--set", f"weights={wrong}")
    assert code == 2
    [line] = errors.splitlines()
    assert WRONG[kind] in line
    assert not (tmp_path / "run").exists()
    if kind in ("of another network", "missing"):
        assert run_cli(*command)[::2] == (0, "")
        assert (tmp_path / "run/models/base/test.json").is_file()


def test_other_weights_than_those_of_the_run_are_refused(run_cli, base_job, tmp_path):
    """The base has been fine-tuned from the first ones."""
    file, run = base_job
    shutil.copytree(run, tmp_path / "run")
    other = tmp_path / "other.safetensors"
    save_file(timm.create_model(NAME).state_dict(), other)
    code, _, errors = run_cli("train", file, "--out", tmp_path / "run", "--set", f"weights={other}")
    assert code == 2
    assert "other.safetensors" in errors
    assert "Choose another --out" in errors


def test_a_run_without_a_base_has_no_teacher(tmp_path, photos):
    file = tmp_path / "tiny.yaml"
    data = DataSettings(source=str(photos), workers=0, val_images=6, test_images=6).model_dump(mode="json")
    file.write_text(yaml.safe_dump({"space": tiny_space().model_dump(mode="json"), "data": data}))
    base, _, _ = fine_tuned(file, tmp_path / "run")
    assert base is None
    assert not (tmp_path / "run/models").exists()
