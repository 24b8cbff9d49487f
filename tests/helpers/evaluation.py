"""Test helpers shared by `tests.greedy.test_evaluation` and others."""

import torch
from torch.nn import functional as F


def one_at_a_time(net, path, images, labels, bn, chunks, calibration):
    """Return loss and accuracy of a path as a network of its own, with its BatchNorm put into the mode by hand."""
    network = net.subnet(path).double()
    norms = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    network.eval()
    with torch.no_grad():
        if bn == "recalibrate":
            for norm in norms:
                norm.momentum = 1.0
                norm.train()
            network(calibration.double())
            network.eval()
        elif bn == "batch":
            for norm in norms:
                norm.running_mean = norm.running_var = None
        logits = torch.cat([network(images[i::chunks].double()) for i in range(chunks)])
        labels = torch.cat([labels[i::chunks] for i in range(chunks)])
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()
