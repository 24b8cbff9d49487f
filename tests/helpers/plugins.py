"""Test helpers: registrations, as of a plugin, that last as long as a test."""

import io
import textwrap
from contextlib import contextmanager

import torch

from greedynas.deploy.formats.format import Format
from greedynas.models.model_file import make_network, parse_card
from greedynas.runtime.files import write_atomically


@contextmanager
def registered(registry, **implementations):
    """Register implementations by name, and remove them on exit."""
    for name, implementation in implementations.items():
        registry.register(name, implementation)
    try:
        yield
    finally:
        for name in implementations:
            registry._found.pop(name)


def example_of(module, imports=""):
    """Return the code in the docstring of a module as the text of a plugin."""
    lines = [line for line in module.__doc__.splitlines() if line.startswith("    ") or not line]
    return f"{imports}\n{textwrap.dedent(chr(10).join(lines))}"


@contextmanager
def forgetting(registry):
    """Restore a registry on exit."""
    before = dict(registry._found)
    try:
        yield
    finally:
        registry._found.clear()
        registry._found.update(before)


class Toy(Format):
    """The state of a network in torch's own format, with a runtime that rebuilds the network."""

    name, suffix, runtime_name = "toy", ".toy", "Toy Runtime"
    precisions = ("fp32", "bf16", "ternary")
    published = True

    def convert(self, source, precision, file):
        if precision == "ternary":
            raise RuntimeError("three values\nare too few")
        images = sum(len(batch) for batch in source.calibration()) if precision == "bf16" else 0
        state = source.cache.setdefault("state", source.network.state_dict())
        kind = torch.bfloat16 if precision == "bf16" else torch.float32
        state = {name: value.to(kind) if value.is_floating_point() else value for name, value in state.items()}
        buffer = io.BytesIO()
        torch.save({"card": source.card.model_dump_json(exclude_none=True), "state": state, "images": images}, buffer)
        write_atomically(file, buffer.getvalue())

    def open(self, file, threads=None):
        content = torch.load(file, weights_only=True)
        network = make_network(parse_card(content["card"], file))
        network.load_state_dict(content["state"])
        return torch.inference_mode()(network.eval())

    def runtime(self):
        return "toy 0.1"
