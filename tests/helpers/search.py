"""Test helpers shared by `tests.stages.test_search` and others."""

DATA = {"val_images": 12, "test_images": 6, "workers": 0, "pad": 1}


def console():
    from rich.console import Console

    return Console(quiet=True)
