"""The report of a run: facts read from its files, charts, tables and the sentences around them."""

from greedynas.runtime.packages import require_packages


def check_packages() -> None:
    """Raise an error if a package that the report needs is missing."""
    require_packages("the report", {"jinja2": "jinja2", "plotly": "plotly"})
