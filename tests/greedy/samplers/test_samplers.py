"""Tests of the samplers: the built-in ones and those of plugins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greedynas import CandidatePool, Fixed, GreedyNASError, Space, Stage, load_space
from greedynas.greedy.samplers.fair import fair_paths
from greedynas.greedy.samplers.greedy import Greedy
from greedynas.greedy.samplers.sampler import Draw, Drawn, FunctionSampler, Sampler, make_sampler
from greedynas.greedy.schedule import Schedule
from greedynas.greedy.settings import SAMPLERS, TrainSettings
from greedynas.spaces.feasible import FeasiblePaths
from tests.helpers.strategies import spaces
from tests.helpers.training import SETTINGS, same_tensors, tiny_space, train

pytestmark = pytest.mark.usefixtures("one_thread")
MACRO = load_space("macro")


def draw_of(space=MACRO, seed=0, **changes):
    def losses(paths):
        raise AssertionError("nothing is to be evaluated")

    facts = {"step": 0, "filters": False, "epsilon": 0.0, "pool": CandidatePool(3), "losses": losses, **changes}
    return Draw(space, TrainSettings(), np.random.default_rng(seed), **facts)


def test_a_draw_keeps_the_limits_of_the_training():
    limits = {"macs": (None, int(np.median(MACRO.cost_tables["macs"].range)))}
    limited = draw_of(feasible=FeasiblePaths(MACRO.cost_tables, limits))
    paths = limited.uniform(50)
    assert len(paths) == 50
    assert MACRO.costs([*paths, limited.explore()]).macs.max() <= limits["macs"][1]
    assert MACRO.costs(draw_of().uniform(50)).macs.max() > limits["macs"][1]


@given(spaces(), st.integers(0, 5))
def test_fair_paths_contain_every_op_of_every_layer_once(space, seed):
    if len(set(space.num_ops)) > 1:
        with pytest.raises(GreedyNASError, match="fair"):
            fair_paths(space, np.random.default_rng(seed))
        return
    paths = np.array(fair_paths(space, np.random.default_rng(seed)))
    assert paths.shape == (space.num_ops[0], len(space.layers))
    assert (np.sort(paths, axis=0) == np.arange(space.num_ops[0])[:, None]).all()


def test_fair_paths_of_uneven_spaces_are_refused():
    stages = [Stage(channels=8), Stage(channels=8, ops=["ID", "MB3_K3", "MB6_K3"])]
    space = Space(
        name="uneven", ops=["ID", "MB3_K3"], stem=[Fixed(op="CONV_K3", channels=8)], stages=stages, image_size=8
    )
    with pytest.raises(GreedyNASError, match=r"uneven has \[2, 3\]"):
        fair_paths(space, np.random.default_rng(0))


@pytest.mark.parametrize(("name", "paths"), [("greedy", 1), ("uniform", 1), ("fair", 3)])
def test_an_update_trains_the_stated_number_of_paths(name, paths):
    sampler = make_sampler(name)
    drawn = sampler.draw(draw_of())  # greedy: during warm-up
    assert drawn.filtered is None
    assert [len(update) for update in drawn.updates] == [paths] == [sampler.paths_per_update(MACRO)]
    assert sampler.filters == (name == "greedy")
    again, other = sampler.draw(draw_of()), sampler.draw(draw_of(seed=1))
    assert drawn == again != other


def test_greedy_trains_the_paths_that_filtering_keeps():
    draw = draw_of(filters=True, losses=lambda paths: [float(sum(path)) for path in paths])
    drawn = Greedy().draw(draw)
    assert drawn.updates == [[path] for path, _ in drawn.filtered.kept]
    assert (len(drawn.filtered.kept), len(drawn.filtered.rejected)) == (5, 5)


# Samplers of plugins


def test_a_function_is_a_sampler(data, registered):
    """The function takes a `Draw` and returns paths in any form; each is trained by one update."""
    draws = []

    def favourites(draw):
        draws.append(draw)
        return ["1111", (0, 1, 2, 0), [2, 2, 2, 2]]

    registered(SAMPLERS, "favourites", favourites)
    sampler = make_sampler("favourites")
    assert isinstance(sampler, FunctionSampler)
    paths = [(1, 1, 1, 1), (0, 1, 2, 0), (2, 2, 2, 2)]
    assert sampler.draw(draw_of(tiny_space())).updates == [[path] for path in paths]
    draws.clear()
    net, state = train(data, sampler="favourites")
    assert (state.step, state.draws, state.evaluation_images, len(state.pool)) == (12, 4, 0, 0)
    assert [draw.step for draw in draws] == [0, 3, 6, 9]
    assert not any(draw.filters for draw in draws)
    assert len({draw.rng.random() for draw in draws}) == 4  # a stream for each
    trained = [int(net.layers[0][op].depthwise.norm.num_batches_tracked) for op in (1, 2)]
    assert trained == [4, 4]
    settings = TrainSettings(**{**SETTINGS, "sampler": "favourites"})
    assert Schedule(settings, 42).predicted_images(space=tiny_space()) == (120, 0)


def test_a_function_that_draws_uniformly_is_uniform_sampling(data, registered):
    registered(SAMPLERS, "evenly", lambda draw: draw.uniform())
    ours, _ = train(data, sampler="evenly")
    theirs, _ = train(data, sampler="uniform")
    assert same_tensors(ours.state_dict(), theirs.state_dict())


def test_evaluations_of_a_function_are_counted(data, registered):
    def best_of_three(draw):
        paths = draw.uniform(3)
        losses = draw.losses(paths)
        assert draw.losses(paths) == losses  # on the same images
        return [paths[int(np.argmin(losses))]]

    registered(SAMPLERS, "best of three", best_of_three)
    _, state = train(data, sampler="best of three", max_epochs=1)
    assert state.step == 4
    assert 0 < state.evaluation_images <= 4 * 2 * 3 * 6
    assert state.evaluation_images % (2 * 6) == 0
    assert len(state.pool) == 0


class Pairs(Sampler):
    """Draws two paths for each update, and accepts only spaces with four layers."""

    def check(self, space):
        if len(space.layers) != 4:
            raise GreedyNASError("four layers are needed")

    def paths_per_update(self, space):
        return 2

    def draw(self, draw):
        return Drawn([draw.uniform(2)])


def test_a_class_is_a_sampler(data, registered):
    registered(SAMPLERS, "pairs", Pairs)
    settings = TrainSettings(**{**SETTINGS, "sampler": "pairs"})
    _, state = train(data, sampler="pairs")
    assert (state.step, state.optimization_images) == (12, 240)
    assert Schedule(settings, 42).predicted_images(space=tiny_space()) == (240, 0)
    with pytest.raises(GreedyNASError, match="four layers are needed"):
        train(data, tiny_space(repeat=1), sampler="pairs")


def test_a_class_needs_no_other_name_than_sampler(data, registered):
    class Plain(Sampler):
        def paths_per_update(self, space):
            return 2

        def draw(self, draw):
            return [[list(path) for path in draw.uniform(2)], ["0000", (1, 1, 1, 1)]]

    registered(SAMPLERS, "plain", Plain)
    _, state = train(data, sampler="plain")
    assert (state.step, state.draws, state.optimization_images) == (12, 6, 240)


@pytest.mark.parametrize("drawn", [None, [(0, 0, 0, 0)], [0], [["0003"]], {"updates": []}])
def test_updates_that_a_class_cannot_mean_are_one_line(data, registered, drawn):
    class Odd(Sampler):
        def draw(self, draw):
            return drawn

    registered(SAMPLERS, "odd", Odd)
    with pytest.raises(GreedyNASError, match=r"a list of paths for each update|a path is a sequence|has no op 3"):
        train(data, sampler="odd")


@pytest.mark.parametrize("drawn", [[], [[]], [["0000"], []]])
def test_a_sampler_that_draws_no_path_is_an_error(data, registered, drawn):
    class Nothing(Sampler):
        def draw(self, draw):
            return Drawn(drawn)

    registered(SAMPLERS, "nothing", Nothing)
    with pytest.raises(GreedyNASError, match=r"^the sampler 'nothing' drew no path for an update$"):
        train(data, sampler="nothing")


def test_invalid_paths_are_refused(data, registered):
    registered(SAMPLERS, "broken", lambda draw: ["0123"])
    with pytest.raises(GreedyNASError, match="op 3"):
        train(data, sampler="broken")
