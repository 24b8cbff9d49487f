"""YAML files of people and of strangers: small, safe, a mapping; nothing in them is executed."""

from pathlib import Path
from typing import Any

import yaml

from greedynas.errors import GreedyNASError

MAX_BYTES = 1_000_000


class _PlainLoader(yaml.SafeLoader):
    """Safe YAML without aliases: our files need none, and a few lines of them can grow to gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed here")
        return super().compose_node(parent, index)


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
        data = yaml.load(text, Loader=_PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise GreedyNASError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise GreedyNASError(f"{file} is no {kind}: it should be a mapping of names to values")
    return data
