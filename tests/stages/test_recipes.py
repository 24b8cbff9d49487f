"""Tests of the numbers of the paper's two recipes."""

import math

import pytest
import torch
from timm.optim import RMSpropTF
from torch import nn

from greedynas import GreedyNASError, load_plugin
from greedynas.settings import recipes as settings_of_recipes
from greedynas.settings.loading import changed_section, load_preset
from greedynas.settings.recipes import RECIPES, Recipe
from greedynas.settings.schema import Config, RetrainSettings
from greedynas.stages.recipes import cosine_schedule, make_optimizer, make_recipe, make_schedule, sgd_optimizer
from tests.helpers.plugins import example_of, forgetting, registered

STEPS = 100  # an epoch


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def recipe_of(recipe, **settings):
    return make_recipe(RetrainSettings(recipe=recipe, **settings))


def learning_rates(recipe, epochs, steps_per_epoch=STEPS):
    optimizer = make_optimizer(network(), recipe)
    schedule = make_schedule(optimizer, recipe, steps_per_epoch)
    found = []
    for epoch in epochs:
        schedule.step_update(round(epoch * steps_per_epoch))
        (lr,) = {group["lr"] for group in optimizer.param_groups}
        found.append(lr)
    return found


def test_the_numbers_of_sgd():
    recipe = recipe_of("sgd")
    assert (recipe.epochs, recipe.batch_size, recipe.lr, recipe.momentum) == (300, 256, 0.05, 0.9)
    assert (recipe.weight_decay, recipe.label_smoothing, recipe.dropout, recipe.ema) == (4e-5, 0.1, 0.1, 0.0)
    found = learning_rates(recipe, [0, 75, 100, 150, 200, 225, 299])
    assert found == pytest.approx([0.05, 0.0426776695, 0.0375, 0.025, 0.0125, 0.0073223305, 1.3707659e-6])
    (last,) = learning_rates(recipe, [300 - 1 / STEPS])
    assert 0 < last < 1e-9


def test_the_numbers_of_rmsprop():
    recipe = recipe_of("rmsprop")
    assert (recipe.epochs, recipe.batch_size, recipe.lr, recipe.momentum) == (350, 512, 0.064, 0.9)
    assert (recipe.eps, recipe.weight_decay, recipe.ema, recipe.dropout) == (1e-3, 1e-5, 0.999, 0.2)
    # From 0 to 0.064 by step in five epochs, then times 0.97 for every three epochs since epoch 0.
    found = learning_rates(recipe, [0, 0.01, 1, 2.5, 4.99, 5, 5.99, 6, 8.99, 9, 150, 349])
    decayed = [0.06208, 0.06208, 0.0602176, 0.0602176, 0.058411072, 0.0139561840, 0.0018693953]
    assert found == pytest.approx([0, 0.000128, 0.0128, 0.032, 0.063872, *decayed])
    assert found[-1] == pytest.approx(0.064 * 0.97**116)


@pytest.mark.parametrize(("name", "batch", "lr"), [("sgd", 256, 0.05), ("rmsprop", 512, 0.064)])
def test_the_learning_rate_follows_the_batch_size(name, batch, lr):
    for size in (32, batch, 1024):
        assert recipe_of(name, batch_size=size).lr == pytest.approx(lr * size / batch)
    assert recipe_of(name, batch_size=2 * batch, lr=0.3).lr == pytest.approx(0.6)


def test_the_optimizers():
    sgd = make_optimizer(network(), recipe_of("sgd"))
    assert type(sgd) is torch.optim.SGD
    assert {(group["momentum"], group["nesterov"], group["dampening"]) for group in sgd.param_groups} == {
        (0.9, True, 0)
    }
    rmsprop = make_optimizer(network(), recipe_of("rmsprop"))
    assert type(rmsprop) is RMSpropTF
    assert {(group["momentum"], group["eps"], group["alpha"]) for group in rmsprop.param_groups} == {(0.9, 1e-3, 0.9)}
    assert not make_optimizer(network(), recipe_of("sgd", momentum=0)).param_groups[0]["nesterov"]


@pytest.mark.parametrize(("name", "decay"), [("sgd", 4e-5), ("rmsprop", 1e-5)])
def test_weight_decay_spares_batchnorm_and_biases(name, decay):
    net = network()
    decays = {
        id(p): group["weight_decay"]
        for group in make_optimizer(net, recipe_of(name)).param_groups
        for p in group["params"]
    }
    assert {key: decays[id(p)] for key, p in net.named_parameters()} == {
        "0.weight": decay,
        "1.weight": 0,
        "1.bias": 0,
        "3.weight": decay,
        "3.bias": 0,
    }


def test_every_number_of_a_recipe_can_be_set():
    changes = {"epochs": 7, "batch_size": 512, "lr": 0.1, "momentum": 0.5, "weight_decay": 1e-3, "label_smoothing": 0.2}
    changes |= {"dropout": 0.3, "ema": 0.9, "warmup_epochs": 1, "eps": 0.1, "decay_rate": 0.5, "decay_epochs": 2}
    changes |= {"clip_grad": 2, "mixup": 0.2, "cutmix": 1, "erasing": 0.25, "randaugment": "rand-m9-mstd0.5"}
    recipe = recipe_of("rmsprop", **changes)
    assert {key: getattr(recipe, key) for key in changes} == changes
    assert learning_rates(recipe, [0.5, 1, 2, 4, 6]) == pytest.approx([0.05, 0.1, 0.05, 0.025, 0.0125])


def test_a_short_training_has_a_short_warmup():
    """Check that the warm-up takes at most a fifth of all epochs, and that the cosine then ends at 0."""
    recipe = recipe_of("rmsprop", epochs=10)
    assert recipe.warmup_epochs == 2
    assert learning_rates(recipe, [0, 1, 2, 3]) == pytest.approx([0, 0.032, 0.064, 0.06208])
    recipe = recipe_of("sgd", epochs=4, warmup_epochs=5)
    assert learning_rates(recipe, [0, 0.4, 0.8, 2.4]) == pytest.approx([0, 0.025, 0.05, 0.025])
    assert learning_rates(recipe, [3.99])[0] < 1e-5
    assert recipe_of("rmsprop", epochs=100).shortened(5).warmup_epochs == 1
    assert recipe_of("rmsprop", epochs=100).shortened(5).lr == 0.064
    assert math.isclose(learning_rates(recipe_of("rmsprop", epochs=1), [0.5], 1)[0], 0.064)  # a single step


def test_settings_of_the_other_recipe_are_refused():
    with pytest.raises(GreedyNASError, match="decay_epochs is a setting of rmsprop; the recipe is sgd"):
        recipe_of("sgd", decay_epochs=3)
    with pytest.raises(GreedyNASError, match=r"'rand-m9-foo' is not in timm's notation, such as rand-m9-mstd0\.5"):
        recipe_of("sgd", randaugment="rand-m9-foo")


# Recipes of plugins


def adamw(net, recipe):
    return torch.optim.AdamW(net.parameters(), recipe.lr, eps=recipe.eps, weight_decay=recipe.weight_decay)


ADAMW = Recipe({"epochs": 20, "batch_size": 64, "lr": 1e-3, "weight_decay": 0.05, "eps": 1e-8}, adamw, cosine_schedule)


def test_a_recipe_of_a_plugin_has_its_own_numbers():
    with registered(RECIPES, adamw=ADAMW):
        recipe = recipe_of("adamw", batch_size=128, weight_decay=0.1, dropout=0.3)
        assert (recipe.name, recipe.epochs, recipe.lr, recipe.eps) == ("adamw", 20, 2e-3, 1e-8)
        assert (recipe.weight_decay, recipe.dropout) == (0.1, 0.3)
        assert (recipe.label_smoothing, recipe.ema) == (0, 0)  # off by default
        assert (recipe.momentum, recipe.warmup_epochs, recipe.decay_rate) == (None, None, None)
        assert type(make_optimizer(network(), recipe)) is torch.optim.AdamW
        assert learning_rates(recipe, [0, 10]) == pytest.approx([2e-3, 1e-3])
        assert recipe.shortened(5).epochs == 5
        assert Config(name="tiny", space="macro", retrain={"recipe": "adamw"}).retrain.recipe == "adamw"


def test_the_example_in_the_documentation(tmp_path):
    (tmp_path / "plugin_of_a_recipe.py").write_text(example_of(settings_of_recipes, "import torch\n"))
    with forgetting(RECIPES):
        load_plugin(str(tmp_path / "plugin_of_a_recipe.py"))
        recipe = recipe_of("adamw")
        assert type(make_optimizer(network(), recipe)) is torch.optim.AdamW
        assert learning_rates(recipe, [0, 2.5, 5, 52.5]) == pytest.approx([0, 5e-4, 1e-3, 5e-4])


@pytest.mark.parametrize(
    ("key", "owners"),
    [("momentum", "sgd and rmsprop"), ("warmup_epochs", "sgd and rmsprop"), ("decay_rate", "rmsprop")],
)
def test_numbers_that_a_recipe_does_not_have_are_refused(key, owners):
    with registered(RECIPES, adamw=ADAMW):
        with pytest.raises(GreedyNASError) as error:
            recipe_of("adamw", **{key: 0.5})
        assert str(error.value) == f"retrain.{key} is a setting of {owners}; the recipe is adamw"


def test_parts_of_the_recipes_can_be_reused():
    bare = Recipe({"epochs": 10, "batch_size": 32, "lr": 0.1}, sgd_optimizer, cosine_schedule)
    with registered(RECIPES, bare=bare):
        group = make_optimizer(network(), recipe_of("bare")).param_groups[0]
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0, 0, False)


def test_unknown_recipes_are_refused_with_a_list():
    text = "unknown recipe 'adam'(?: .did you mean 'adamw'..)?; known: sgd, rmsprop, finetune{}"
    with pytest.raises(GreedyNASError, match=text.format(r" \(those of a plugin need --plugin MODULE\)$")):
        load_preset("fashion", {"retrain.recipe": "adam"})
    with registered(RECIPES, adamw=ADAMW), pytest.raises(GreedyNASError, match="^" + text.format(", adamw")):
        changed_section(load_preset("fashion"), "retrain", {"recipe": "adam"})


def test_recipes_without_required_numbers_are_refused():
    with pytest.raises(GreedyNASError, match="a recipe needs a default for batch_size, lr"):
        Recipe({"epochs": 1}, adamw, cosine_schedule)
    with pytest.raises(GreedyNASError, match="unknown number of a recipe 'learning_rate'"):
        Recipe({"epochs": 1, "batch_size": 2, "learning_rate": 1}, adamw, cosine_schedule)
    with pytest.raises(GreedyNASError, match="already a recipe named 'sgd'"):
        RECIPES.register("sgd", ADAMW)
