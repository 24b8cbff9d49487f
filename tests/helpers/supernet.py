"""Helpers of tests: shared by `tests.models.test_supernet` and others."""

import torch


def with_lively_statistics(net):
    """BatchNorm statistics and scales that differ from one channel to the next, as after training."""
    generator = torch.Generator().manual_seed(1)
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            module.weight.data.uniform_(0.5, 1.5, generator=generator)
            module.bias.data.normal_(0, 0.3, generator=generator)
    return net
