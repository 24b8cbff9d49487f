"""Small runs around a pretrained network, for the tests of training, stages and jobs: random weights, few small images.

Their base is registered with timm like any other network: a stem, four blocks, a head and a classifier.
"""

from pathlib import Path

import timm
import torch
import yaml
from safetensors.torch import save_file
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.efficientnet import EfficientNet, decode_arch_def
from torch import nn
from torch.nn import functional as F

from tests.helpers.pictures import paint

NAME = "greedynas_test_base"
SIZES = (16, 24)
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
CLASSES = {"a": 14, "b": 14, "c": 14}  # 30 images to train on, 6 for validation, 6 for a test
LIMIT = 250_000  # multiply-adds: some paths of each size are within it, and the whole network at 24 px is not
FOUND = "macs-60K"  # the found network: only images of 16 px keep this limit
SECTIONS = {
    "data": {"val_images": 6, "test_images": 6, "workers": 0, "augment": "pad_crop", "pad": 2},
    "train": {
        **{"max_epochs": 2, "batch_size": 10, "filter_images": 6, "bn_images": 6, "pool_size": 4, "m": 3, "k": 2},
        **{
            "warmup": 0.2,
            "lr": 0.02,
            "stopping": False,
            "whole_every": 2,
            "limits": {"max_macs": LIMIT},
            "log_every": 1,
        },
    },
    "search": {"population": 4, "generations": 2, "bn_images": 6},
    "adapt": {"epochs": 2, "batch_size": 10},
    "retrain": {"recipe": "finetune", "epochs": 2, "batch_size": 12, "inherit": True, "teacher": "base"},
}
LIMITS = {"macs": (["60K"], None), "params": (None, None), "latency_ms": (None, None)}

default_cfgs = generate_default_cfgs(
    {
        f"{NAME}.random": {
            **{"url": "", "num_classes": 7, "input_size": (3, 24, 24), "mean": MEAN, "std": STD},
            **{"first_conv": "conv_stem", "classifier": "classifier"},
        }
    }
)


@register_model
def greedynas_test_base(pretrained=False, **settings):
    blocks = decode_arch_def([["ds_r1_k3_s1_e1_c8"], ["ir_r2_k5_s2_e4_c16_se0.25"], ["ir_r1_k3_s2_e3_c24"]])
    how = {"block_args": blocks, "stem_size": 8, "num_features": 32, "act_layer": nn.Hardswish, **settings}
    return build_model_with_cfg(EfficientNet, NAME, pretrained, **how)


def write_weights(file: Path, name: str = NAME, seed: int = 0) -> Path:
    """Write random weights under timm's names, with the BatchNorm statistics of noise, and return the file."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        network = timm.create_model(name)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        network(F.interpolate(torch.randn(32, 3, 5, 5), 32, mode="bicubic"))
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(network.state_dict(), file)
    return file


def write_job(folder: Path, name: str = "job.yaml", base: str = NAME, sizes=SIZES, **changes) -> Path:
    """Write images, weights and the settings of a job around a base; return the file of settings.

    `changes` are sections, which are merged into the usual ones, and other settings.
    """
    if not (folder / "photos").exists():
        paint(folder / "photos", CLASSES, size=(30, 28))
    weights = folder / f"{base}.safetensors"
    if not weights.exists():
        write_weights(weights, base)
    space = folder / f"around-{name}"
    space.write_text(yaml.safe_dump({"name": "around", "base": base, "sizes": list(sizes)}))
    settings = {"space": str(space), "weights": str(weights), "device": "cpu"}
    for section, usual in SECTIONS.items():
        settings[section] = {**usual, **changes.pop(section, {})}
    settings["data"].setdefault("source", str(folder / "photos"))
    (folder / name).write_text(yaml.safe_dump({**settings, **changes}))
    return folder / name
