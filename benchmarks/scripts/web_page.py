"""Classify 20 images with an exported page in headless Chromium, and compare the classes with PyTorch.

    python -m benchmarks.scripts.web_page MODEL_FOLDER IMAGES --out FOLDER/web-page

MODEL_FOLDER has `model.web` and `model.safetensors` (a folder `models/NAME` of a run). 20 images are drawn from IMAGES.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from greedynas import predict
from tests.helpers.web_page import classes_of, installed_browser, served, wait_for_status


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    files = sorted(file for file in options.images.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
    files = [files[i] for i in np.random.default_rng(0).permutation(len(files))[:20]]
    expected = list(predict(options.model / "model.safetensors", files))
    rows = []
    with sync_playwright() as playwright, served(options.model / "model.web") as address:
        browser = playwright.chromium.launch(executable_path=installed_browser(), args=["--no-sandbox"])
        page = browser.new_page()
        elsewhere: list[str] = []
        page.on(
            "request",
            lambda one: None if one.url.startswith((address, "data:", "blob:")) else elsewhere.append(one.url),
        )
        page.goto(address)
        wait_for_status(page, "Ready.")
        for file, wanted in zip(files, expected, strict=True):
            found = classes_of(page, file)
            rows.append({"image": f"{file.parent.name}/{file.name}", "page": found[0], "pytorch": wanted.classes[0]})
        browser.close()
    same = sum(row["page"][0] == row["pytorch"][0] for row in rows)
    worst = max(abs(row["page"][1] - row["pytorch"][1]) for row in rows)
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"same_class": same, "largest_difference": worst, "requests_elsewhere": elsewhere, "images": rows}
    (options.out / "page.json").write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{same} of {len(rows)} classes agree; largest difference of the first class {worst:.2g}; requests elsewhere: {len(elsewhere)}"
    )


if __name__ == "__main__":
    main()
