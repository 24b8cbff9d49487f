"""Watch a running job in headless Chromium, and record how its curves grow.

    greedynas demo --out RUN &
    python -m benchmarks.scripts.watch_demo RUN --seconds 330 --out watch.json

The record has the points of every chart each 15 seconds, the number of page loads, all messages of the console, and all
requests to other addresses than the loopback one.
"""

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from greedynas.monitoring.live_page import LiveServer

POINTS = """Object.fromEntries([...document.querySelectorAll('[data-chart]')].filter(place => place.data).map(
    place => [place.dataset.chart, place.data.reduce((sum, trace) => sum + (trace.x ? trace.x.length : 0), 0)]))"""


def watch(address: str, seconds: float, browser: str) -> dict[str, Any]:
    """Open the live page for some seconds, and return what happened."""
    found: dict[str, Any] = {"problems": [], "foreign": [], "samples": [], "loads": 0}
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        page.on("console", lambda message: found["problems"].append(message.text))
        page.on("pageerror", lambda error: found["problems"].append(str(error)))
        page.on("load", lambda: found.update(loads=found["loads"] + 1))
        page.on("request", lambda asked: None if asked.url.startswith(address) else found["foreign"].append(asked.url))
        page.goto(address)
        page.wait_for_selector("html[data-shown]", timeout=60_000)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found["samples"].append({"now": page.locator("#now").inner_text(), "points": page.evaluate(POINTS)})
            page.wait_for_timeout(15_000)
    return found


def main() -> None:
    """Serve the live page of a run, watch it, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    while not (given.run / "config.yaml").exists():
        time.sleep(1)
    with LiveServer(given.run) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = watch(server.address, given.seconds, given.browser)
        server.shutdown()
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
