"""The report of a run: facts read from its files, charts, tables and the words around them."""

from greedynas.runtime.packages import require_packages


def check_packages() -> None:
    """Refuse to write a page where a package is missing that pages are made with."""
    require_packages("the report", {"jinja2": "jinja2", "plotly": "plotly"})
