"""Spaces around pretrained networks: which smaller versions of each block there are, and the files that describe them."""

import pytest
import yaml

from greedynas import GreedyNASError, Space, load_space
from greedynas.models.bases.elastic import Elastic, space_around
from greedynas.models.bases.timm_bases import base_space
from greedynas.spaces.ops import parse_op
from greedynas.spaces.paths import canonical, most_expensive, op_names, parse_path
from tests.helpers.bases import SMALL, small_space, space_from, whole_path

BASES = [SMALL, "tf_efficientnet_lite0", "mobilenetv2_050", "fbnetc_100"]


@pytest.mark.parametrize("name", BASES)
def test_the_whole_network_is_the_last_path_and_the_most_expensive_one(name):
    base, space = base_space(name), load_space(f"timm:{name}")
    whole = whole_path(space)
    assert op_names(whole, space) == op_names([0] * len(base.layers), base)
    assert most_expensive(space) == whole
    assert space.costs([whole]).__dict__ == base.costs([[0] * len(base.layers)]).__dict__
    assert (space.base, space.image_size, space.num_classes) == (name, base.image_size, 1000)
    assert (space.mean, space.std) == (base.mean, base.std)
    sized = space_around(base, sizes=[64, 32, 64])
    assert (sized.sizes, sized.image_size) == ((32, 64), 64)
    assert most_expensive(sized) == whole_path(sized)


@pytest.mark.parametrize("name", BASES)
def test_every_op_is_a_smaller_version_of_its_block(name):
    space = load_space(f"timm:{name}")
    smaller = 0
    for layer in space.layers:
        ops = [parse_op(op) for op in layer.ops]
        assert ("ID" in layer.ops) == layer.block.residual
        built = [op for op in ops if op.family != "ID"]
        hidden = {op.hidden(layer.in_channels) for op in built}
        assert max(hidden) == layer.block.hidden
        assert all(width % 8 == 0 for width in hidden - {layer.block.hidden})
        assert {op.kernel for op in built} == set(range(3, layer.block.kernel + 1, 2))
        assert {op.se for op in built} == ({True, False} if layer.block.squeeze else {False})
        assert len(built) == len(hidden) * len({op.kernel for op in built}) * len({op.se for op in built})
        assert [op.hidden(layer.in_channels) for op in built] == sorted(op.hidden(layer.in_channels) for op in built)
        if not layer.block.expands:
            assert hidden == {layer.in_channels}
        smaller += len(hidden) > 1
    assert smaller >= len(space.layers) - 3  # all but a depthwise-separable block and very narrow ones


def test_the_widths_are_shares_of_the_hidden_channels():
    space = small_space(widths=(0.5, 0.25))
    layer = space.layers[-1]  # 48 channels, 288 hidden ones
    assert {parse_op(op).hidden(48) for op in layer.ops if op != "ID"} == {288, 144, 72}


@pytest.mark.parametrize(
    ("option", "lost"),
    [
        ({"kernels": False}, lambda op, layer: op.family == "MB" and op.kernel < layer.block.kernel),
        ({"without_se": False}, lambda op, layer: op.family == "MB" and layer.block.squeeze > 0 and not op.se),
        ({"skip": False}, lambda op, layer: op.family == "ID"),
        ({"widths": (1.0,)}, lambda op, layer: op.family == "MB" and op.hidden(layer.in_channels) < layer.block.hidden),
    ],
)
def test_each_way_to_shrink_can_be_switched_off(option, lost):
    every, fewer = small_space(sizes=()), small_space(sizes=(), **option)
    for layer, rest in zip(every.layers, fewer.layers, strict=True):
        assert rest.ops == tuple(op for op in layer.ops if not lost(parse_op(op), layer))
    assert fewer.size < every.size


def test_nothing_may_shrink():
    space = small_space(widths=(1.0,), kernels=False, without_se=False, skip=False, sizes=())
    assert space.size == 1


def test_paths_around_a_base_are_networks_of_their_own():
    """Check that equal ops do not move from one block to another, whose weights differ."""
    space = small_space(sizes=())
    names = list(op_names(whole_path(space), space))
    first, second = ([*names[:4], *ops, *names[6:]] for ops in (["ID", names[5]], [names[4], "ID"]))
    assert names[4] == names[5]
    for path in (first, second):
        assert canonical(parse_path(path, space), space) == parse_path(path, space)


# Files


@pytest.mark.parametrize("name", [*BASES, "mobilenetv3_rw", "tf_efficientnet_b0"])
def test_a_space_around_a_base_is_read_back_from_yaml(name, tmp_path):
    for sizes in ((), (32, 48)):
        space = small_space(sizes=sizes, base=name)
        file = tmp_path / "space.yaml"
        again = space_from(file, space.to_yaml())
        assert again == space
        assert (again.sizes, again.neck, again.layers) == (space.sizes, space.neck, space.layers)
        assert Space.model_validate_json(space.model_dump_json()) == space


def test_a_file_names_a_base_and_how_it_may_shrink(tmp_path):
    text = f"base: {SMALL}\nname: leaves\nsizes: [64, 48]\nnum_classes: 27\nwidths: [0.5]\nkernels: no\nskip: false\n"
    space = space_from(tmp_path / "a.yaml", text + "without_se: no")
    assert space == space_around(
        base_space(SMALL), Elastic(widths=(0.5,), kernels=False, skip=False, without_se=False), [48, 64], "leaves"
    ).adapt(num_classes=27)
    assert (space.name, space.sizes, space.num_classes, space.base) == ("leaves", (48, 64), 27, SMALL)
    plain = space_from(tmp_path / "b.yaml", f"base: {SMALL}\nimage_size: 96")
    assert plain == load_space(f"timm:{SMALL}").adapt(image_size=96)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: nosuchnet", "timm has no model 'nosuchnet'"),
        ("base: hf-hub:somebody/something", "timm has no model 'hf-hub:somebody/something'"),
        ("base: ''", "base"),
        ("base: 5", "base"),
        ("base: resnet18", "resnet18 is not made of inverted bottlenecks and depthwise-separable blocks alone"),
        ("base: efficientnet_es", r"\(it has a EdgeResidual\)"),
        ("base: efficientnet_b0_gn", r"\(a normalisation of the kind GroupNormAct\)"),
        ("base: efficientnet_blur_b0", r"\(anti-aliasing\)"),
        ("base: tf_mixnet_s", "tf_mixnet_s is not made of inverted bottlenecks"),
        ("base: mobilenetv4_conv_small", r"\(a bottleneck behind a plain convolution\)"),
        ("base: efficientnet_l2", "efficientnet_l2 cannot be a base: stages: .* at most 64 items"),
        (f"base: {SMALL}\nsizes: [16, 64]", "image_size 16 is too small: .* use at least 32"),
        (f"base: {SMALL}\nimage_size: 31", "image_size 31 is too small: .* use at least 32"),
        (f"base: {SMALL}\nsizes: [64, 96]\nimage_size: 64", "give sizes or image_size, not both"),
        (f"base: {SMALL}\nsizes: [0]", r"sizes\.0"),
        (f"base: {SMALL}\nsizes: 64", "sizes"),
        (f"base: {SMALL}\nkernel: no", "kernel: Extra inputs are not permitted"),
        (f"base: {SMALL}\nwidths: []", "widths"),
        (f"base: {SMALL}\nwidths: [1.5]", r"widths\.0"),
        (f"base: {SMALL}\nwidths: [-0.5]", r"widths\.0"),
        (f"base: {SMALL}\nwidths: [.nan]", r"widths\.0"),
        (f"base: {SMALL}\nwidths: [.inf]", r"widths\.0"),
        (f"base: {SMALL}\nskip: perhaps", "skip"),
        (f"base: {SMALL}\nnum_classes: 0", "num_classes"),
    ],
)
def test_wrong_files_with_a_base_get_one_line(text, message, tmp_path):
    with pytest.raises(GreedyNASError, match=message) as error:
        space_from(tmp_path / "wrong.yaml", text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def spoiled(**changes):
    return yaml.safe_dump({**yaml.safe_load(small_space().to_yaml()), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": [48, 32, 64]}, r"sizes must rise, got \[48, 32, 64\]"),
        ({"sizes": [32, 32, 64]}, "sizes must rise"),
        ({"sizes": [32, 48]}, "image_size must be the largest of sizes, 48"),
        ({"sizes": [16, 64]}, "image_size 16 is too small"),
        ({"mean": [0.5]}, "mean and std need 3 values each"),
        ({"std": None}, "mean and std need 3 values each"),
        ({"std": [0.5, 0.5, 0.0]}, r"std\.2"),
        ({"base": "../somewhere"}, "base"),
        ({"bases": "a"}, "bases: Extra inputs are not permitted"),
    ],
)
def test_wrong_spaces_around_a_base_get_one_line(changes, message, tmp_path):
    with pytest.raises(GreedyNASError, match=message) as error:
        space_from(tmp_path / "wrong.yaml", spoiled(**changes))
    assert "\n" not in str(error.value)


def test_an_op_that_does_not_fit_its_block_is_refused(tmp_path):
    data = yaml.safe_load(small_space().to_yaml())
    for op, message in {
        "MB5_K5": r"stage 1 \(layer 2 of the network\): MB5_K5 is no smaller version",
        "ID": "ID cannot replace a block without a residual",
        "PX32": "PX32 is an image size: list it in sizes",
    }.items():
        data["stages"][0]["ops"] = [op]
        with pytest.raises(GreedyNASError, match=message):
            space_from(tmp_path / "wrong.yaml", yaml.safe_dump(data))


def test_an_image_size_among_the_ops_of_a_plain_space_is_refused(tmp_path):
    text = load_space("macro").to_yaml().replace("[ID, ", "[PX96, ")
    with pytest.raises(GreedyNASError, match="PX96 is an image size: list it in sizes"):
        space_from(tmp_path / "wrong.yaml", text)
