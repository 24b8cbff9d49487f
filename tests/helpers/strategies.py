"""Hypothesis strategies: random spaces and their paths."""

from hypothesis import strategies as st

from greedynas import Fixed, Space, Stage

MB_OPS = ["ID", "CONV_K1", "CONV_K3", "MB1_K3", "MB2_K3", "MB3_K5", "MB4_K7", "MB3_K3_SE", "MB6_K5_SE"]
SHUFFLE_OPS = ["SHUFFLE_K3", "SHUFFLE_K5", "SHUFFLE_K7", "XCEPTION_K3"]


@st.composite
def spaces(draw) -> Space:
    """Draw small spaces of both block families, with ops by stage, odd image sizes, and one or three image channels."""
    shuffle = draw(st.booleans())
    ops = st.lists(st.sampled_from(SHUFFLE_OPS if shuffle else MB_OPS), min_size=1, max_size=4, unique=True)
    stages, width = [], 8
    for _ in range(draw(st.integers(1, 3))):
        # ShuffleNet units keep an even width at stride 1 and grow at stride 2.
        width = width + 2 * draw(st.integers(1, 6)) if shuffle else draw(st.integers(4, 20))
        stride = 2 if shuffle else draw(st.integers(1, 3))
        stages.append(Stage(channels=width, repeat=draw(st.integers(1, 4)), stride=stride, ops=draw(st.none() | ops)))
    return Space(
        name="random",
        ops=draw(ops),
        stem=[Fixed(op="CONV_K3", channels=8, stride=draw(st.integers(1, 2)))],
        stages=stages,
        head=draw(st.sampled_from([[], [Fixed(op="CONV_K1", channels=24)]])),
        image_size=draw(st.integers(54, 70)),
        image_channels=draw(st.sampled_from([1, 3])),
        num_classes=draw(st.integers(2, 12)),
        activation=draw(st.sampled_from(["relu", "hard_swish"])),
    )


def paths_of(space: Space) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*(st.integers(0, count - 1) for count in space.num_ops))
