"""Pretrained weights of timm models, from a file or from the user's own cache. Nothing is fetched, nothing is executed."""

import warnings
from pathlib import Path
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from greedynas.runtime.errors import GreedyNASError

CACHE = "cache"


def load_pretrained(network: nn.Module, name: str, source: str | Path) -> None:
    """Put the weights of a file, or those that timm has cached, into a fresh timm model.

    A classifier for another number of classes stays as it is, and the first convolution follows the number of channels.
    """
    from timm.models import adapt_input_conv  # type: ignore[attr-defined]

    file = cached_weights(name) if source == CACHE else Path(source)
    weights = read_weights(file)
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


def read_weights(file: Path) -> dict[str, Tensor]:
    """Tensors by name from a safetensors file, or a torch file that holds tensors alone."""
    from timm.models import load_state_dict  # type: ignore[attr-defined]

    if not file.is_file():
        raise GreedyNASError(f"no such file of weights: {file}")
    try:
        with warnings.catch_warnings(action="ignore"):  # what is wrong is said in one line below
            weights = load_state_dict(str(file), weights_only=True)
    except Exception as error:  # of two libraries, for all kinds of files
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise GreedyNASError(f"{file} is not a file of weights that can be read safely: {reason:.200}") from None
    return {key: value for key, value in weights.items() if isinstance(value, Tensor)}


def cached_weights(name: str) -> Path:
    """The file that timm itself would use, if it is on this machine."""
    import timm
    from huggingface_hub import try_to_load_from_cache

    about = timm.get_pretrained_cfg(name)
    if about is None or not about.has_weights:
        raise GreedyNASError(f"timm has no pretrained weights of {name}; name a file, or train it from scratch")
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
        f"the pretrained weights of {name} are not in this machine's cache, and greedynas fetches nothing: put them there "
        f"with timm.create_model({name!r}, pretrained=True), or name a file"
    )


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())
