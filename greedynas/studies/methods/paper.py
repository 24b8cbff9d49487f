"""Numbers from the paper, for comparison with ours."""

# Tables 1 and 7 of the paper (ImageNet): top-1 in percent by supernet and searcher. FairNAS-C used its own searcher.
PAPER_TOP1 = {
    "uniform, random": 74.07,
    "uniform-E, random": 73.88,
    "greedy, random": 74.22,
    "uniform, evolution": 74.50,
    "uniform-E, evolution": 74.17,
    "fair, evolution": 74.69,
    "greedy, evolution": 74.85,
}
NO_SUPERNET = "random network"  # the contestant
