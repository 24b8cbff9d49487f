"""Test helpers for the exported page: a static web server, and the page in headless Chromium."""

import functools
import http.server
import shutil
import threading
from contextlib import contextmanager

BROWSERS = ("chromium", "google-chrome", "chromium-browser", "google-chrome-stable")


def installed_browser():
    """Return the program of an installed browser, or None."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


_Handler.extensions_map = {**_Handler.extensions_map, ".mjs": "text/javascript", ".wasm": "application/wasm"}


@contextmanager
def served(folder):
    """Serve a folder on this machine, and return its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def wait_for_status(page, text):
    """Wait until the status of the page contains a text."""
    page.locator("#status").filter(has_text=text).wait_for(timeout=60_000)


def classes_of(page, file):
    """Return the classes that the open page shows for an image: (name, probability), most likely first."""
    page.set_input_files("#file", str(file))
    wait_for_status(page, f"{file.name}: classified")
    rows = page.locator("#result tbody tr").all_inner_texts()
    return [(row.split("\t")[0], float(row.split("\t")[1].rstrip("%")) / 100) for row in rows]
