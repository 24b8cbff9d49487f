"""YAML files of people and of strangers: small, safe, a mapping; nothing in them is executed."""

from pathlib import Path
from typing import Any

import yaml

from greedynas.runtime.errors import GreedyNASError

MAX_BYTES = 1_000_000


class _PlainLoader(yaml.SafeLoader):
    """Safe YAML without aliases, dates and repeated keys.

    Our files need no aliases, and a few lines of them can grow to gigabytes. A date is the name of a folder, or a mistake. Of
    a key that is given twice, YAML would drop one value without a word.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed here")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.YAMLError(f"{key.value!r:.60} is given twice")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_PlainLoader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(file: Path, kind: str) -> dict[str, Any]:
    """What a file holds; `kind` says in messages what it should be."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise GreedyNASError(f"{file}: larger than {MAX_BYTES:,} bytes, that is no {kind}")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GreedyNASError(f"cannot read {file}: {error}") from None
    return parse_yaml(text, file, kind)


def parse_yaml(text: str, file: Path, kind: str) -> dict[str, Any]:
    if len(text) > MAX_BYTES:
        raise GreedyNASError(f"{file}: larger than {MAX_BYTES:,} bytes, that is no {kind}")
    try:
        data = parse_value(text)
    except ValueError as error:
        raise GreedyNASError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise GreedyNASError(f"{file} is no {kind}: it should be a mapping of names to values")
    return data


def parse_value(text: str) -> Any:
    """Return what a piece of YAML holds. Raises ValueError, with a line that says what is wrong, and nothing else."""
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except Exception as error:  # besides its own, whatever Python raises for a scalar such as `!!int ""`
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
