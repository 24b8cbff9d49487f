"""Self-contained HTML pages with plotly charts: everything is in the file, and no other script runs in it."""

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
from greedynas.runtime.text import percent

PAGE = Path(__file__).parent / "page"


def render_page(template: str, charts: Mapping[str, Chart], **context: Any) -> str:
    """A template of `page/` with its charts. Everything that it is given is escaped: by Jinja in HTML, as JSON in data."""
    scripts = {"page": (PAGE / "report.js").read_text(encoding="utf-8"), "plotly": get_plotlyjs()}
    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = percent
    return environment.get_template(template).render(
        **context,
        charts=charts,
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup((PAGE / "report.css").read_text(encoding="utf-8")),
        scripts={name: Markup(text) for name, text in scripts.items()},
        hashes=" ".join(f"'sha256-{_sha256(text)}'" for text in scripts.values()),
        data=script_data({"figures": {name: chart.figure.to_dict() for name, chart in charts.items()}, "dark": DARK}),
    )


def script_data(value: Any) -> Markup:
    """JSON that is safe inside a script element, whatever strings it holds."""
    text = json.dumps(value, cls=PlotlyJSONEncoder, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c"))  # neither </script nor <!--


def _sha256(script: str) -> str:
    """For the content security policy: no other script runs in the page, whatever got into it."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
