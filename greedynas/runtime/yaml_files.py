"""Reading of untrusted YAML files: they must be small and hold a mapping, and nothing in them is executed."""

from pathlib import Path
from typing import Any

import yaml

from greedynas.runtime.errors import GreedyNASError

MAX_BYTES = 1_000_000


class _PlainLoader(yaml.SafeLoader):
    """A loader for safe YAML without aliases, dates and repeated keys.

    Our files need no aliases, and a few lines of aliases can expand to gigabytes. A text that looks like a date is the
    name of a folder, or a mistake. YAML would silently drop one value of a key that is given twice.
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
    """Return the mapping that a file holds; `kind` names in messages what the file should be."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise GreedyNASError(f"{file} is not a {kind}: it is larger than {MAX_BYTES:,} bytes")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GreedyNASError(f"cannot read {file}: {error}") from None
    return parse_yaml(text, file, kind)


def parse_yaml(text: str, file: Path, kind: str) -> dict[str, Any]:
    if len(text) > MAX_BYTES:
        raise GreedyNASError(f"{file} is not a {kind}: it is larger than {MAX_BYTES:,} bytes")
    try:
        data = parse_value(text)
    except ValueError as error:
        raise GreedyNASError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise GreedyNASError(f"{file} is not a {kind}: it should be a mapping of names to values")
    return data


def parse_value(text: str) -> Any:
    """Return the value of a piece of YAML. Raises nothing but ValueError, with one line that says what is wrong."""
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except Exception as error:  # YAML's own errors, and anything that Python raises for a scalar such as `!!int ""`
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
