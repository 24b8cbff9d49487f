import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from greedynas import GreedyNASError, Supernet, evaluate_paths, load_space
from greedynas.experimental.split_after_identity import SplitSupernet
from greedynas.greedy import evaluation
from greedynas.greedy.evaluation import evaluate_batches, interleaved
from greedynas.models.batchnorm import BN_MODES, bn_mode
from greedynas.runtime.parallel import ranks
from tests.helpers.evaluation import one_at_a_time
from tests.helpers.strategies import paths_of, spaces
from tests.helpers.supernet import with_lively_statistics


@given(st.data())
@settings(max_examples=20)
def test_shared_prefixes_equal_one_path_at_a_time(data):
    space = data.draw(spaces()).adapt(image_size=54)
    kind = data.draw(st.sampled_from([Supernet, SplitSupernet]))
    net = kind(space, generator=torch.Generator().manual_seed(0))
    with_lively_statistics(net).double()
    paths = data.draw(st.lists(paths_of(space), min_size=1, max_size=6))
    bn = data.draw(st.sampled_from(BN_MODES.names()))
    generator = torch.Generator().manual_seed(1)
    shape = (space.image_channels, 54, 54)
    images, calibration = (torch.randn(n, *shape, generator=generator, dtype=torch.float64) for n in (7, 5))
    labels = torch.randint(0, space.num_classes, (7,), generator=generator)
    chunks = data.draw(st.integers(1, 3))
    result = evaluate_paths(net, paths, images, labels, bn, bn_images=-(-7 // chunks), calibration=calibration)
    chunks = max(1, round(7 / -(-7 // chunks)))
    expected = [one_at_a_time(net, path, images, labels, bn, chunks, calibration) for path in paths]
    np.testing.assert_allclose(result.losses, [loss for loss, _ in expected], rtol=1e-6)
    np.testing.assert_allclose(result.accuracies, [accuracy for _, accuracy in expected])
    assert result.images == 7 * len(set(paths))
    # Every distinct prefix runs once for each chunk of images.
    prefixes = {path[: depth + 1] for path in paths for depth in range(len(path))}
    assert result.layers_run == chunks * len(prefixes)
    assert result.layers_plain == chunks * len(set(paths)) * len(space.layers)


def test_blocks_run_once_for_each_prefix():
    net = Supernet("macro")
    runs = []
    for layer in net.layers:
        for block in layer:
            block.register_forward_hook(lambda *_: runs.append(1))
    paths = [(0,) * 8, (0,) * 7 + (1,), (0,) * 8, (1, *(0,) * 7)]
    evaluate_paths(net, paths, torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.long))
    assert len(runs) == 8 + 1 + 8


def test_ranking_all_of_macro_runs_under_a_fifth_of_the_layers():
    space = load_space("macro").adapt(image_size=8)
    paths = list(itertools.product(range(3), repeat=8))
    result = evaluate_paths(Supernet(space), paths, torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    assert result.layers_run == sum(3**depth for depth in range(1, 9))
    assert result.layers_run < 0.2 * result.layers_plain
    assert len(np.unique(result.losses)) > 6000


@pytest.mark.parametrize("bn", BN_MODES.names())
def test_evaluation_leaves_the_network_unchanged(bn):
    net = with_lively_statistics(Supernet("macro")).train()
    net.layers[0].eval()  # a mixture of modes must be restored too
    modes = [module.training for module in net.modules()]
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    storages = [tensor.data_ptr() for tensor in net.state_dict().values()]
    rng = torch.get_rng_state()
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    evaluate_paths(net, [(1,) * 8, (2,) * 8], images, torch.zeros(8, dtype=torch.long), bn, calibration=images)
    assert [module.training for module in net.modules()] == modes
    assert [tensor.data_ptr() for tensor in net.state_dict().values()] == storages
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(rng, torch.get_rng_state())
    assert all(norm.track_running_stats for norm in net.modules() if isinstance(norm, torch.nn.BatchNorm2d))


def test_batch_statistics_depend_only_on_bn_images():
    """Evaluating the images in other chunks must not change a result: only the setting groups images."""
    net = Supernet("fashion").double()
    images = torch.randn(12, 1, 28, 28, dtype=torch.float64)
    labels = torch.arange(12) % 10
    whole = evaluate_paths(net, [(1,) * 7], images, labels, "batch", bn_images=12).losses
    halves = [
        evaluate_paths(net, [(1,) * 7], images[part], labels[part], "batch", bn_images=6).losses
        for part in (slice(0, 12, 2), slice(1, 12, 2))
    ]
    grouped = evaluate_paths(net, [(1,) * 7], images, labels, "batch", bn_images=6).losses
    np.testing.assert_allclose(grouped, sum(halves) / 2)
    assert abs(grouped - whole) > 1e-6
    running = [evaluate_paths(net, [(1,) * 7], images, labels, "running", bn_images=size).losses for size in (1, 5, 12)]
    assert np.ptp(running) < 1e-9


def test_correct_predictions_are_returned_for_each_image():
    """They are in the order of the images, whatever the number of chunks."""
    net = with_lively_statistics(Supernet("fashion", generator=torch.Generator().manual_seed(0)))
    paths = [(1,) * 7, (2,) * 7, (1,) * 7]
    images = torch.randn(7, 1, 28, 28, generator=torch.Generator().manual_seed(0))

    def predicted(path):
        return torch.cat([net.subnet(path).eval()(image[None]).argmax(1) for image in images])

    labels = torch.where(torch.tensor([1, 1, 0, 0, 0, 1, 0]).bool(), predicted(paths[0]), predicted(paths[0]) + 1) % 10
    expected = np.array([(predicted(path) == labels).tolist() for path in paths])
    assert expected[0].tolist() == [True, True, False, False, False, True, False]
    assert expected[1].tolist() != expected[0].tolist()
    for chunk in (2, 3, 7):
        result = evaluate_paths(net, paths, images, labels, "running", bn_images=chunk, keep_correct=True)
        assert (result.correct == expected).all()
        np.testing.assert_allclose(result.accuracies, expected.mean(1))
    assert evaluate_paths(net, paths, images, labels).correct is None


@pytest.mark.parametrize(
    ("images", "size", "expected"),
    [(7, 1, 3), (7, 2, 3), (7, 3, 2), (7, 7, 1), (7, 100, 1), (8, 3, 3), (2, 1, 1), (1, 1, 1), (1000, 300, 3)],
)
def test_chunks_have_nearly_the_size_asked_for_and_at_least_two_images(images, size, expected):
    chunks = interleaved(images, size)
    assert len(chunks) == expected
    assert sorted(np.concatenate(chunks)) == list(range(images))
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert all((np.diff(chunk) == expected).all() for chunk in chunks)


def test_one_image_is_enough_with_running_statistics():
    net = with_lively_statistics(Supernet("fashion"))
    image = torch.randn(1, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    result = evaluate_paths(net, [(1,) * 7], image, torch.tensor([3]), "running")
    loss, _ = one_at_a_time(net, (1,) * 7, image, torch.tensor([3]), "running", 1, None)
    assert result.losses[0] == pytest.approx(loss, rel=1e-4)
    batches = [(image, torch.tensor([3]))]
    assert evaluate_batches(net, [(1,) * 7], batches, "running").correct is None


def test_evaluation_computes_in_the_given_precision():
    net = with_lively_statistics(Supernet("fashion"))
    images, labels = torch.randn(6, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    losses = {
        p: evaluate_paths(net, [(1,) * 7], images, labels, "running", precision=p).losses for p in ("fp32", "bf16")
    }
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = net.subnet((1,) * 7).eval()(images)
    assert logits.dtype == torch.bfloat16
    assert losses["bf16"][0] == pytest.approx(F.cross_entropy(logits.float(), labels).item(), rel=1e-6)
    assert losses["fp32"][0] != pytest.approx(losses["bf16"][0], rel=1e-6)


def test_invalid_arguments_are_refused():
    net, images, labels = Supernet("macro"), torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)
    with pytest.raises(GreedyNASError, match="empty"):
        evaluate_paths(net, [(0,) * 8], images[:0], labels[:0])
    with pytest.raises(GreedyNASError, match="unknown BatchNorm mode 'none'"):
        evaluate_paths(net, [(0,) * 8], images, labels, "none")
    with pytest.raises(GreedyNASError, match="calibrate"):
        evaluate_paths(net, [(0,) * 8], images, labels, "recalibrate")
    with pytest.raises(GreedyNASError, match="has 8 ops"):
        evaluate_paths(net, [(0,) * 7], images, labels)


def test_an_evaluation_without_batches_is_refused():
    with pytest.raises(GreedyNASError, match="the evaluation set is empty"):
        evaluate_batches(Supernet("fashion"), [(0,) * 7], [])


def test_recalibration_includes_the_head():
    net = with_lively_statistics(Supernet("fashion", generator=torch.Generator().manual_seed(0)).double())
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in net.head.modules())
    generator = torch.Generator().manual_seed(0)
    images, calibration = (torch.randn(6, 1, 28, 28, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.arange(6)
    found = evaluate_paths(net, [(1,) * 7], images, labels, "recalibrate", calibration=calibration)
    loss, _ = one_at_a_time(net, (1,) * 7, images, labels, "recalibrate", 1, calibration)
    assert found.losses[0] == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("counts", [(1, 3, 7, 11), (5, 6, 9, 13), (2, 30, 49, 200)])
def test_constant_predictions_have_the_same_balanced_accuracy_for_every_class(counts):
    """The cheapest of several paths with equal accuracies is chosen, so the last digits matter."""
    net = Supernet(load_space("fashion").adapt(num_classes=4, image_size=8))
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    accuracies = set()
    for answer in range(4):
        torch.nn.init.zeros_(net.classifier.weight)
        net.classifier.bias.data = torch.eye(4)[answer]
        for chunk in (4, 100):
            found = evaluate_paths(
                net, [(1,) * 7], torch.zeros(len(labels), 1, 8, 8), labels, "running", bn_images=chunk, balanced=True
            )
            accuracies.add(float(found.accuracies[0]))
    assert accuracies == {0.25}


def test_a_rank_without_paths_gets_the_results_of_the_others(monkeypatch):
    """With a single path, the first of two ranks has none."""
    monkeypatch.setattr(ranks, "share", lambda paths: paths[:0])
    monkeypatch.setattr(ranks, "largest", lambda number: max(number, 3))
    monkeypatch.setattr(ranks, "gather_values", lambda word: [word, 21])
    theirs = iter([np.array([0.7]), np.array([2 / 3]), np.array([[True, False, True]])])
    monkeypatch.setattr(ranks, "gather", lambda own: [own, next(theirs)])
    batches = [(torch.zeros(1, 1, 28, 28), torch.tensor([0]))] * 3
    found = evaluate_batches(Supernet("fashion"), [(1,) * 7] * 2, batches, keep_correct=True)
    assert (found.losses.tolist(), found.accuracies.tolist()) == ([0.7] * 2, [2 / 3] * 2)
    assert found.correct.tolist() == [[True, False, True]] * 2
    assert found.correct.dtype == bool
    assert (found.images, found.layers_run, found.layers_plain) == (3, 21, 21)


class OnGPU(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    device = torch.device("cuda")


def test_weighted_evaluation_on_a_gpu_is_not_recorded(monkeypatch):
    """A recording adds up the losses of several images, and weights would have to be applied before."""
    net, path, labels = with_lively_statistics(Supernet("fashion")), [(1,) * 7], torch.arange(6)
    images = torch.randn(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    asked, recorded = [], "a recording"
    monkeypatch.setattr(
        "greedynas.greedy.graphs.evaluation.recorded_evaluation",
        lambda *arguments: asked.append(arguments) or (recorded and (lambda *given: (recorded, given))),
    )

    def evaluate(images, weights=None):
        with torch.no_grad():
            return evaluation._evaluate_chunk(net, path, [0], images, labels, None, "running", "fp32", weights)

    weights = torch.linspace(0.5, 1.5, 6)
    plain, weighted = evaluate(images), evaluate(images, weights)
    assert asked == []  # on the CPU nothing is recorded
    on_gpu = images.as_subclass(OnGPU)
    torch.testing.assert_close(evaluate(on_gpu, weights)[0].as_subclass(torch.Tensor), weighted[0])
    assert asked == []
    assert evaluate(on_gpu) == (recorded, (net, path, [0], on_gpu, labels, None))
    assert asked == [(net, 1, on_gpu, labels, None, "running", "fp32")]
    recorded = None  # while recording is not worthwhile
    torch.testing.assert_close(evaluate(on_gpu)[0].as_subclass(torch.Tensor), plain[0])


def test_the_buffers_of_recalibration_are_yielded_and_discarded():
    net = Supernet("fashion")
    buffers = dict(net.named_buffers())
    with bn_mode(net, "recalibrate") as made:
        assert {id(tensor) for tensor in made} == {id(tensor) for tensor in net.buffers()}
        assert not {id(tensor) for tensor in made} & {id(tensor) for tensor in buffers.values()}
    assert all(tensor is buffers[name] for name, tensor in net.named_buffers())
    for mode in ("batch", "running"):
        with bn_mode(net, mode) as made:
            assert made == []
