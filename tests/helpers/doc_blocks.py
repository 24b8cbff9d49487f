"""Test helpers: the code blocks of README and docs, and a way to restore the registries after a block."""

import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from greedynas.api import plugins

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>run|skip): (?P<what>[^>]*?) -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    A comment before it states its needs: `<!-- run: runs/photos -->` names files that must exist besides `photos/`, and
    `<!-- skip: why -->` gives the reason why it is compiled and not run.
    """

    page: Path
    line: int
    language: str
    code: str
    mark: str | None
    what: str

    @property
    def name(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page, *languages):
    """Return the blocks of a page in the given languages, in order."""
    text = page.read_text()
    found = [
        Block(
            page,
            text[: match.start("code")].count("\n") + 1,
            match["language"],
            match["code"],
            match["mark"],
            match["what"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if block.language in languages]


def commands(page):
    """Return the commands that console blocks of a page show, each as one line."""
    found = []
    for block in blocks(page, "console"):
        joined = block.code.replace("\\\n", " ")
        found += [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]
    return found


@contextmanager
def registries_kept():
    """Restore all registries on exit."""
    before = [(registry, dict(registry._found)) for registry in plugins._REGISTRIES]
    try:
        yield
    finally:
        for registry, found in before:
            registry._found.clear()
            registry._found.update(found)
