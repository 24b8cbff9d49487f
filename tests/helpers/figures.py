"""Test helpers shared by `tests.spaces.test_paths` and others."""

FIGURES = {  # parameters, multiply-adds at 224 px and 1000 classes
    "greedynas-a": (6_503_082, 369_983_648),
    "greedynas-b": (5_207_804, 323_520_704),
    "greedynas-c": (4_740_746, 284_284_064),
    "proxyless-r": (4_080_512, 320_427_584),
}
