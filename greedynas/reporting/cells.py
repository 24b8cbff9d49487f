"""Tables of text and numbers, for pages and terminals."""

from dataclasses import dataclass

from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True)
class Table:
    """A table whose cells are text. Columns after the first hold numbers unless they are named in `words`."""

    columns: list[str]
    rows: list[list[str]]
    words: frozenset[str] = frozenset()
    marked: int | None = None  # the row that the others are compared with
    note: str = ""
    title: str = ""


def make_table(columns: dict[str, list[str]], words: set[str] | None = None, **more: object) -> Table:
    """Return a table of the given columns, without columns that have no value."""
    kept = {name: values for name, values in columns.items() if any(values)}
    rows = [[value or "–" for value in row] for row in zip(*kept.values(), strict=True)]
    return Table(list(kept), rows, frozenset(words or ()), **more)  # type: ignore[arg-type]


def rich_table(table: Table) -> RichTable:
    """Return a table in the form that a terminal prints."""
    result = RichTable(title=Text(table.title), title_justify="left", caption=table.note and Text(table.note))
    for i, column in enumerate(table.columns):
        result.add_column(Text(column), justify="left" if i == 0 or column in table.words else "right")
    for row in table.rows:
        result.add_row(*(Text(cell) for cell in row))
    return result
