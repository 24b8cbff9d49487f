"""A reference for the memory of networks: an executor that runs a recorded network op by op and frees what is not needed.

It knows nothing of spaces: the ops come from running the module, and a tensor is freed after its last use. A strided
convolution of an image with an even side is run as a padding and a convolution without padding, as in LiteRT.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

FUSED = ("batch_norm", "relu", "hardswish", "hardsigmoid", "hardtanh")  # computed in place, behind a convolution
ALIASES = ("aten.view", "aten.t.", "aten.unsqueeze", "aten._unsafe_view", "aten.detach")  # the same bytes, other shape


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))  # keeps every tensor, so that no id is used twice
        return out


def _tensors(values):
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


@torch.no_grad()
def measured_peak(network, image):
    """Return the logits and the largest number of values that were in memory at an op."""
    with _Recorder() as recorder:
        network(image)
    last = {id(tensor): number for number, call in enumerate(recorder.calls) for tensor in _tensors(call[1:3])}
    made = {id(image)} | {id(tensor) for call in recorder.calls for tensor in _tensors(call[3])}
    memory, owner, sizes, peak = {id(image): image.clone()}, {id(image): id(image)}, {id(image): image.numel()}, 0
    logits = None

    def held():
        return {owner[key] for key in memory}

    for number, (func, args, kwargs, recorded) in enumerate(recorder.calls):
        inputs = [tensor for tensor in _tensors((args, kwargs)) if id(tensor) in made and id(tensor) in owner]
        args, kwargs = tree_map(
            lambda value: memory[id(value)] if isinstance(value, torch.Tensor) and id(value) in memory else value,
            (args, kwargs),
        )
        ends = [tensor for tensor in inputs if last[id(tensor)] == number]
        padded = 0
        if "convolution" in str(func) and _is_padded(args):
            copy = torch.nn.functional.pad(args[0], 2 * [args[4][1]] + 2 * [args[4][0]])
            padded = copy.numel()
            peak = max(peak, padded + sum(sizes[key] for key in held()))
            args = [copy, *args[1:4], [0, 0], *args[5:]]
            for tensor in ends:
                memory.pop(id(tensor))
        results = _tensors(func(*args, **kwargs))
        before = held()
        for old, new in zip(_tensors(recorded), results, strict=True):
            if id(old) not in last and old is not recorder.calls[-1][3]:
                continue  # the statistics that batch_norm also returns
            if not inputs:
                continue  # of parameters alone, such as a transposed weight: they are not activations
            key = id(old)
            alias = str(func).startswith(ALIASES)
            fused = any(name in str(func) for name in FUSED)
            in_place = id(old) == id(inputs[0])  # as of relu_
            assert not fused or in_place or [id(tensor) for tensor in ends] == [id(inputs[0])], (
                "an input that is overwritten is needed"
            )
            owner[key] = owner[id(inputs[0])] if alias or fused else key
            sizes.setdefault(owner[key], new.numel())
            memory[key] = new if alias else new.clone()
        peak = max(peak, padded + sum(sizes[key] for key in before | held()))
        for tensor in ends:
            memory.pop(id(tensor), None)
        logits = results[0]
    return logits, peak


def _is_padded(args):
    """Return whether LiteRT pads the input of a convolution (input, weight, bias, stride, padding…) in an op of its own."""
    return args[3][0] > 1 and args[4][0] > 0 and args[0].shape[2] % 2 == 0


def stored_bytes(network):
    """Return the bytes of a network's weights in int8, with bias and scale of each output channel, from its modules."""
    layers = [module for module in network.modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    return sum(layer.weight.numel() + 8 * layer.weight.shape[0] for layer in layers)
