"""Self-contained HTML pages with plotly charts, which load nothing and run only their own scripts."""

import base64
import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from greedynas._version import __version__
from greedynas.reporting.charts import DARK, Chart
from greedynas.runtime.text import milliseconds, percent

PAGE = Path(__file__).parent / "page"


def render_page(
    template: str, charts: Mapping[str, Chart], *, live: str = "", connect: str = "", **context: Any
) -> str:
    """Return a page from a template of `page/` and its charts; all given values are escaped, by Jinja or as JSON.

    The live page has another script, and an origin that it may connect to.
    """
    scripts = {"page": (PAGE / "report.js").read_text(encoding="utf-8"), "plotly": get_plotlyjs()}
    scripts |= {"live": live} if live else {}
    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"percent": percent, "milliseconds": milliseconds}
    return environment.get_template(template).render(
        **context,
        charts=charts,
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup((PAGE / "report.css").read_text(encoding="utf-8")),
        scripts={"live": "", **{name: Markup(text) for name, text in scripts.items()}},
        connect=Markup(connect),
        hashes=" ".join(f"'sha256-{_sha256(text)}'" for text in scripts.values()),
        data=script_data({"figures": {name: chart.figure.to_dict() for name, chart in charts.items()}, "dark": DARK}),
    )


def script_data(value: Any) -> Markup:
    """Return JSON that is safe inside a script element, whatever strings it contains."""
    text = json.dumps(value, cls=PlotlyJSONEncoder, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c"))  # prevents </script and <!--


def _sha256(script: str) -> str:
    """Return the hash of a script for the content security policy, which blocks all other scripts."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
