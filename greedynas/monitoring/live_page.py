"""The live page of a run: a small web server for this machine alone, which only reads the run directory.

It listens on the loopback address and answers only requests with the token that is part of the address. Everything from
the run is shown as text, as in the report; a strict content security policy lets the page load and run nothing else.
"""

import base64
import gzip
import hashlib
import hmac
import html
import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from plotly.utils import PlotlyJSONEncoder

from greedynas.monitoring.live_state import SECTIONS, live_state, signature
from greedynas.reporting.pages import PAGE, render_page
from greedynas.runtime.errors import GreedyNASError
from greedynas.stages.run import read_run_config

HOST = "127.0.0.1"
QUICKEST = 1.5  # seconds between two looks at the run
SHARE = 0.2  # of the time that looking at the run may take
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class LiveState:
    """The newest state of a run as JSON, which is computed again only when the run has changed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = threading.Lock()
        self._next, self._signature = 0.0, ""
        self._body, self._tag = b"{}", ""

    def __call__(self) -> tuple[bytes, str]:
        """Return the JSON and its tag."""
        with self._lock:
            start = time.monotonic()
            if start >= self._next:
                self._look()
                now = time.monotonic()
                self._next = now + max(QUICKEST, (now - start) / SHARE)
            return self._body, self._tag

    def _look(self) -> None:
        found = signature(self.folder)
        if found == self._signature:
            return
        state = live_state(self.folder)
        text = json.dumps(state, cls=PlotlyJSONEncoder, separators=(",", ":"))
        self._body = gzip.compress(text.encode("utf-8", errors="replace"), compresslevel=1)
        self._tag = f'"{hashlib.blake2b(self._body, digest_size=8).hexdigest()}"'
        self._signature = found


class LiveServer(ThreadingHTTPServer):
    """The server of the live page of one run.

    Args:
        folder: The run directory.
        port: The port; 0: any free one.

    Raises:
        GreedyNASError: The folder is not a run directory, or the port is in use.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path, port: int = 0):
        read_run_config(folder)
        self.token = secrets.token_urlsafe(24)
        self.state = LiveState(folder)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise GreedyNASError(f"cannot listen on port {port}: {error}; name another --port") from None
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        self.page, self.policy = _page(folder)

    @property
    def address(self) -> str:
        """The address with the token, which a browser on this machine opens."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that is gone."""


class _Handler(BaseHTTPRequestHandler):
    """Answers requests for the page and its state, and refuses all others."""

    server: LiveServer
    server_version, sys_version = "greedynas", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        token, slash, place = self.path.removeprefix("/").partition("/")
        # A page from elsewhere must not reach the server by a name that it lets point to this machine.
        known = self.headers.get("Host", "") in self.server.hosts
        if not known or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(403, b"open the address that greedynas watch has printed\n", "text/plain")
        elif not slash:  # the page asks for its state below the token
            self._answer(308, b"", "text/plain", {"Location": f"/{self.server.token}/"})
        elif place == "":
            self._answer(200, self.server.page, "text/html; charset=utf-8")
        elif place == "state":
            body, tag = self.server.state()
            if self.headers.get("If-None-Match") == tag:
                self._answer(304, b"", "application/json", {"ETag": tag})
            else:
                self._answer(200, body, "application/json", {"ETag": tag, "Content-Encoding": "gzip"})
        else:
            self._answer(404, b"there is no such page\n", "text/plain")

    def _answer(self, code: int, body: bytes, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response(code)
        headers = {**HEADERS, "Content-Security-Policy": self.server.policy, "Content-Type": kind, **(more or {})}
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing: addresses contain the token."""


def _page(folder: Path) -> tuple[bytes, str]:
    """Return the page without any data of the run but its name, and its content security policy."""
    script = (PAGE / "live.js").read_text(encoding="utf-8")
    page = render_page("live.html", {}, live=script, sections=SECTIONS, folder=folder.resolve().name, connect="'self'")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    inner = html.unescape(page.partition('Content-Security-Policy" content="')[2].partition('"')[0])
    assert f"sha256-{digest}" in inner
    return page.encode("utf-8", errors="replace"), f"{inner}; frame-ancestors 'none'"
