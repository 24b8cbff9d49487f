"""The exported page in headless Chromium, with the files of onnxruntime-web's npm package."""

import numpy as np
import pytest
import torch
from PIL import Image

from greedynas import GreedyNASError
from greedynas.deploy.formats.format import Conversion, make_format
from greedynas.deploy.formats.web_format import NPM, VARIABLE, find_runtime
from greedynas.deploy.prediction import make_input, predict, read_square
from greedynas.models.model_file import save_network
from tests.helpers.model_files import SE, make_card, trained_network
from tests.helpers.pictures import picture
from tests.helpers.web_page import classes_of, served, wait_for_status

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    """Return 20 images of several sizes and kinds, in formats that keep every pixel, and some JPEGs."""
    folder = tmp_path_factory.mktemp("gallery")
    for i in range(20):
        size, mode = ((40 + 7 * i, 90 - 3 * i), ("RGB", "RGB", "L", "RGBA")[i % 4])
        image = picture(i, size, mode)
        image.save(
            folder / (f"{i:02}.jpg" if mode == "L" else f"{i:02}.png"), **({"quality": 95} if mode == "L" else {})
        )
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def needs_runtime():
    try:
        find_runtime()
    except GreedyNASError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("channels", "crop_fraction"), [(3, 0.875), (1, 1.0)])
def test_the_page_classifies_as_pytorch_does(needs_runtime, browser, gallery, tmp_path, channels, crop_fraction):
    space = SE.adapt(image_size=28, image_channels=channels)
    card = make_card(space, image_channels=channels, crop_fraction=crop_fraction, class_names=("a", "b", "<b>c</b>"))
    network = trained_network(card)
    with torch.no_grad():  # so that no class wins for all images
        network.classifier.weight *= 10
        inputs = make_input([read_square(file, card) for file in gallery], card)
        network.classifier.bias -= network(inputs).mean(0)
    save_network(tmp_path / "model.safetensors", network, card)
    make_format("web", converting=True).convert(
        Conversion(network, card, lambda: iter(())), "fp32", tmp_path / "model.web"
    )
    expected = {one.file.name: one.classes for one in predict(tmp_path / "model.safetensors", gallery)}
    from_page_file = {one.file.name: one.classes for one in predict(tmp_path / "model.web", gallery)}
    with served(tmp_path / "model.web") as address:
        context = browser.new_context()
        page = context.new_page()
        requests, problems = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address)
        wait_for_status(page, "Ready.")
        found = {file.name: classes_of(page, file) for file in gallery}
        context.close()
    assert problems == []
    assert requests
    assert all(url.startswith((address, "data:", "blob:")) for url in requests)
    winners = {classes[0][0] for classes in expected.values()}
    assert len(winners) > 1
    for name, classes in expected.items():
        assert [label for label, _ in found[name]] == [label for label, _ in classes]
        shares = np.array([[one[1] for one in result] for result in (classes, found[name], from_page_file[name])])
        assert (
            np.abs(shares[0] - shares[1]).max() < 0.005
        )  # a pixel may be rounded differently, and JPEG decoders differ
        assert np.abs(shares[0] - shares[2]).max() < 1e-4


def test_files_that_are_no_images_are_reported(needs_runtime, browser, tmp_path):
    card = make_card()
    network = trained_network(card)
    make_format("web").convert(Conversion(network, card, lambda: iter(())), "fp32", tmp_path / "model.web")
    (tmp_path / "notes.png").write_text("no image")
    with served(tmp_path / "model.web") as address:
        page = browser.new_page()
        page.goto(address)
        wait_for_status(page, "Ready.")
        page.set_input_files("#file", str(tmp_path / "notes.png"))
        wait_for_status(page, "notes.png cannot be classified")
        assert page.locator("#result").is_hidden()
        page.close()


def test_without_the_npm_package_the_message_has_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(GreedyNASError, match=f"the format 'web' needs .* npm pack {NPM}") as error:
        make_format("web", converting=True)
    assert "\n" not in str(error.value)
    make_format("web")  # to open a page's network, it is not needed
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere.tgz"))
    with pytest.raises(GreedyNASError, match=r"nowhere\.tgz, which does not exist"):
        make_format("web", converting=True)
    Image.new("L", (1, 1)).save(tmp_path / "onnxruntime-web-1.tgz", "PNG")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(GreedyNASError, match="is not the npm package onnxruntime-web"):
        make_format("web", converting=True)
