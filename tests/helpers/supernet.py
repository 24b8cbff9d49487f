"""Test helpers shared by `tests.models.test_supernet` and others."""

import torch


def with_lively_biases(net):
    """Give the biases of convolutions, as in squeeze-and-excitation, values other than zero; return the net."""
    generator = torch.Generator().manual_seed(2)
    for module in net.modules():
        if isinstance(module, torch.nn.Conv2d) and module.bias is not None:
            module.bias.data.normal_(0, 0.3, generator=generator)
    return net


def with_lively_statistics(net):
    """Give every channel different BatchNorm statistics and scales, as after training; return the net."""
    generator = torch.Generator().manual_seed(1)
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            module.weight.data.uniform_(0.5, 1.5, generator=generator)
            module.bias.data.normal_(0, 0.3, generator=generator)
    return net
