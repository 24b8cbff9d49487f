import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from greedynas import Budget, GreedyNASError, load_space
from greedynas.data.settings import DataSettings
from greedynas.data.sources import Files
from greedynas.jobs import auto
from greedynas.jobs.auto import auto_config
from greedynas.jobs.probe import HEADERS, Look, look_at
from greedynas.jobs.resolving import load_config
from greedynas.settings.loading import parse_assignments, preset_names
from greedynas.stages.run import read_data, read_run_config
from greedynas.stages.train import train_stage
from tests.helpers.paths import ROOT
from tests.helpers.pictures import paint, picture, spoil

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_pretrained_weights(monkeypatch):
    """Hide weights that this machine may have: what `auto` does with them is tested in `test_auto_base`."""
    monkeypatch.setattr("greedynas.jobs.auto_base.has_weights", lambda *_: False)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    """Replace the properties of the GPU that the choices depend on, so that no GPU is needed."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def chosen(source, *assignments, device=CPU, budget=None):
    changes = {"data.source": str(source), **parse_assignments(list(assignments))}
    return auto_config(changes, device, budget)


def seen(**changes):
    """Return the facts of imaginary data."""
    facts = {"images": 5000, "fewest": 500, "most": 500, "own_val": None, "own_test": True, "looked_at": 256}
    facts |= {"class_names": tuple(f"class {i}" for i in range(10)), "side": 200, "grey": False}
    return Look(**(facts | changes))


@pytest.fixture
def look(monkeypatch):
    """Return a function that makes auto's choices for any facts: look(device, images=…, …)."""

    def choose(device=CPU, assignments=(), budget=None, **changes):
        monkeypatch.setattr(auto, "look_at", lambda *_: seen(**changes))
        return chosen("somewhere", *assignments, device=device, budget=budget)

    return choose


# The first look


def test_a_look_at_a_folder(tmp_path):
    paint(tmp_path, {"cat": 12, "dog": 30}, size=(60, 40))
    found = look_at(DataSettings(source=str(tmp_path)), seed=0)
    assert (found.images, found.class_names, found.fewest, found.most) == (42, ("cat", "dog"), 12, 30)
    assert (found.side, found.grey, found.own_val, found.own_test, found.looked_at) == (40, False, None, False, 42)
    assert found.describe().startswith("42 colour images in 2 classes (12 to 30 each), half of them at least 40 px")


def test_folders_of_splits(tmp_path):
    for split, count in (("train", 10), ("val", 4), ("test", 3)):
        paint(tmp_path / split, {"a": count, "b": count})
    found = look_at(DataSettings(source=str(tmp_path)), seed=0)
    assert (found.images, found.own_val, found.own_test) == (20, 8, True)
    config, reasons = chosen(tmp_path)
    assert not any("held out" in reason for reason in reasons)
    assert config.train.filter_images == len(read_data(config, CPU).val) == 8
    assert any(reason.startswith("train.filter_images 8: all validation images; ") for reason in reasons)


def test_images_without_colours_are_grey_in_every_mode(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(8):
            grey = picture(i, (40, 40), "L")
            grey.save(tmp_path / name / f"{i}.png")
            grey.convert("RGB").save(tmp_path / name / f"{i}.jpg", quality=70)
    assert look_at(DataSettings(source=str(tmp_path)), seed=0).grey
    config, reasons = chosen(tmp_path)
    assert config.space.image_channels == 1
    assert "pocket is built with one channel, because your images are grey" in reasons
    picture(0, (40, 40)).save(tmp_path / "a" / "red.png")
    assert not look_at(DataSettings(source=str(tmp_path)), seed=0).grey


def test_the_embedded_sample_is_grey():
    config, reasons = chosen("fashion")
    assert reasons[0].startswith("your data: 8,000 grey images in 10 classes (800 each), half of them at least 28 px")
    assert config.space == load_space("fashion")


def test_a_sample_is_enough(tmp_path, monkeypatch):
    paint(tmp_path, {"a": 3, "b": 3})
    opened = []
    whole = Files.image
    monkeypatch.setattr(Files, "image", lambda self, i: (opened.append(i), whole(self, i % 6))[1])
    monkeypatch.setattr(Files, "__len__", lambda self: 100_000)
    assert look_at(DataSettings(source=str(tmp_path)), seed=0).looked_at == HEADERS
    assert len(opened) <= 300
    assert max(opened) > 90_000  # from all over the set


def test_files_that_are_no_images_are_skipped(tmp_path):
    paint(tmp_path, {"a": 10, "b": 10}, size=(50, 50))
    spoil(tmp_path / "a" / "3.png", "text")
    spoil(tmp_path / "b" / "3.png", "truncated")  # its header is fine
    found = look_at(DataSettings(source=str(tmp_path)), seed=0)
    assert (found.looked_at, found.grey) == (19, False)
    for file in tmp_path.glob("*/*.png"):
        spoil(file, "empty")
    with pytest.raises(GreedyNASError, match=r"none of 20 images of .* can be read"):
        look_at(DataSettings(source=str(tmp_path)), seed=0)


# The choices


def test_tiny_images_on_a_cpu(photos):
    config, reasons = chosen(photos)
    assert (config.name, config.space.name, config.space.image_channels, config.space.image_size) == (
        "auto",
        "fashion",
        3,
        16,
    )
    data = read_data(config, CPU)
    assert (len(data.train), len(data.val), len(data.test())) == (39, 9, 12)
    assert config.train.filter_images <= len(data.val)
    assert config.train.batch_size == 8
    assert all("\n" not in reason and len(reason) < 200 for reason in reasons)
    assert (config, reasons) == chosen(photos)  # nothing is drawn, nothing measured


def test_many_classes_with_few_images_can_still_be_split(tmp_path):
    paint(tmp_path, {f"class {i}": 3 for i in range(25)})
    config, _ = chosen(tmp_path)
    data = read_data(config, CPU)
    assert [len(data.train), len(data.val), len(data.test())] == [25, 25, 25]


def test_photographs_on_a_cpu(look):
    config, reasons = look(images=2000, side=400)
    assert (config.space.name, config.space.image_size, config.data.augment) == ("pocket", 128, "resized_crop")
    assert "space pocket: for photographs on a CPU" in reasons
    assert "image_size 128: half of your images are at least 400 px on their shorter side" in reasons
    smaller, _ = look(images=2000, side=100)
    assert (smaller.space.image_size, smaller.data.augment) == (80, "resized_crop")  # 80 / 0.875 < 100 < 96 / 0.875
    more, reasons = look(images=50_000, side=400)
    assert more.space.image_size < 128
    assert any("a larger size would take 2 CPU cores over an hour" in reason for reason in reasons)
    assert more.train.max_epochs < config.train.max_epochs
    assert more.data.val_images == 2000


def test_small_images_on_a_cpu(look):
    config, reasons = look(side=32)
    assert (config.space.name, config.space.image_size, config.data.pad) == ("pocket", 64, 8)
    assert any("32 px on their shorter side, and enlarging images that small helps" in reason for reason in reasons)
    config, _ = look(side=28, grey=True)
    assert (config.space.name, config.space.image_size) == ("fashion", 28)


def test_photographs_on_a_gpu(look):
    config, reasons = look(GPU, images=20_000, side=300)
    assert (config.space.name, config.space.image_size) == ("mobilenet", 224)
    assert (config.train.batch_size, config.train.filter_images) == (256, 128)
    assert (config.retrain.recipe, config.retrain.epochs) == ("sgd", 300)
    assert "space mobilenet: the paper's space, for photographs on a GPU" in reasons
    small, _ = look(GPU, images=50_000, side=32)
    assert (small.space.name, small.space.image_size, small.train.max_epochs) == ("macro", 32, 112)


def test_a_million_images(look):
    names = tuple(f"n{i:08}" for i in range(1000))
    facts = {"images": 1_281_167, "class_names": names, "fewest": 732, "most": 1300, "side": 375}
    config, _ = look(GPU, **facts)
    assert (config.space.name, config.space.image_size) == ("mobilenet-se", 224)
    assert config.data.val_images == 50_000  # 50 a class, as in the paper
    assert (config.train.batch_size, config.train.pool_size) == (1024, 900)
    assert config.data.min_scale == 0.08
    config, _ = look(CPU, **facts)
    assert (config.space.name, config.space.image_size) == ("pocket", 48)


def test_a_gpu_with_little_memory(look, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2 * 2**30))
    config, reasons = look(GPU, images=20_000, side=300)
    assert config.train.batch_size < 64
    assert any("a larger one might not fit into the memory of this GPU" in reason for reason in reasons)


def test_short_epochs_say_nothing_about_the_pool(look):
    config, reasons = look(images=300)
    assert not config.train.stopping
    assert any(reason.startswith("train.stopping false: a pool of") for reason in reasons)
    assert look(images=20_000)[0].train.stopping


def test_unknown_image_sizes(look):
    config, reasons = look(side=None)
    assert config.space.image_size == 64
    assert "image_size 64: the sizes of your images are known only when all are read" in reasons


def test_rare_classes_are_weighted(look):
    config, reasons = look(fewest=100, most=1500)
    assert config.data.class_weights == "balanced"
    assert "data.class_weights balanced: your largest class has 15 times the images of the smallest" in reasons
    assert look(fewest=400, most=600)[0].data.class_weights == "none"


@pytest.mark.parametrize(
    ("names", "grey", "flips"),
    [
        (["cat", "dog"], False, True),
        (["a", "b", "c"], False, False),
        (["0", "1", "2"], True, False),
        (["0", "1", "2"], False, True),  # numbered classes of photographs
        (["left turn", "straight", "right turn"], False, False),
        (["bright", "leftover"], False, True),
    ],
)
def test_classes_that_change_when_mirrored_are_not_flipped(look, names, grey, flips):
    assert look(class_names=tuple(names), grey=grey)[0].data.flip is flips


# Filter images


def filtering(config):
    """Return the cost of filtering relative to that of training."""
    train = config.train
    return train.m * train.filter_images / (train.k * train.batch_size * 3.33)


def reason_for(reasons, key):
    return next(reason for reason in reasons if reason.startswith(f"{key} "))


@pytest.mark.parametrize(
    ("device", "images", "classes", "batch", "expected", "why"),
    [
        (CPU, 20_000, 10, 64, 100, "with fewer, the ranking of paths is too unreliable"),
        (CPU, 20_000, 60, 64, 100, "with fewer, the ranking of paths is too unreliable"),
        (CPU, 400_000, 1000, 64, 100, "with fewer, the ranking of paths is too unreliable"),
        (CPU, 300, 3, 8, 60, "all validation images"),
        (CPU, 30, 3, 8, 6, "all validation images"),
        (CPU, 1250, 3, 32, 100, "with fewer, the ranking of paths is too unreliable"),
        (GPU, 20_000, 10, 256, 128, "half a batch"),
        (GPU, 20_000, 200, 256, 200, "one of each class"),
        (GPU, 400_000, 1000, 256, 256, "a batch, because there are 1,000 classes"),
        (GPU, 1_281_167, 1000, 1024, 1000, "one of each class"),
    ],
)
def test_filter_images_are_enough_for_a_ranking(look, device, images, classes, batch, expected, why):
    config, reasons = look(device, images=images, class_names=tuple(map(str, range(classes))))
    assert (config.train.batch_size, config.train.filter_images) == (batch, expected)
    assert config.train.bn_images == expected
    message = reason_for(reasons, "train.filter_images")
    assert message.startswith(f"train.filter_images {expected:,}: {why}; ")
    assert len(message) < 220
    cost = filtering(config)
    assert f"filtering costs {f'{cost:.1f} times' if cost >= 0.95 else f'{cost:.0%} of'} the training" in message


def test_small_batches_filter_on_fewer_where_that_would_cost_too_much(look):
    """Check a training on 64,000 images of the 200,000 that it may take, so that the rest remains for filtering."""
    config, reasons = look(images=800)
    assert (config.train.batch_size, config.train.max_epochs, config.data.val_images) == (16, 100, 160)
    trained = 100 * 640
    after_warmup = 0.75 * trained
    assert trained + after_warmup * filtering(config) <= 200_000
    assert trained + after_warmup * filtering(config) * 1.03 > 200_000  # one image more
    assert "more would cost over 2.8 times the training" in reason_for(reasons, "train.filter_images")
    hand, reasons = look(images=20_000, assignments=["batch_size=16"])  # no images remain here
    assert filtering(hand) <= 2 < filtering(hand) * (1 + 1 / hand.train.filter_images)
    assert "more would cost over 2 times the training" in reason_for(reasons, "train.filter_images")


def test_filter_images_follow_other_numbers_of_paths(look):
    config, _ = look(images=20_000, assignments=["m=40"])
    assert config.train.filter_images == 53  # two times the training; half a batch would cost 1.2
    config, _ = look(images=20_000, assignments=["m=100"])
    assert config.train.filter_images == 32  # half a batch at least


def test_the_reliability_of_rankings_is_the_recorded_one():
    record = json.loads((ROOT / "benchmarks/records/filter-images-cpu2-2026-11-18/filter_images.json").read_text())
    for count, tau in auto.RELIABILITY:
        found = [np.mean(seed[str(count)]["tau_b"]) for part in record["records"] for seed in part["by_seed"]]
        assert len(found) == 20
        assert tau == pytest.approx(np.mean(found), abs=0.006)


def test_reliability_grows_with_the_images():
    found = [auto._reliability(count) for count in (1, 4, 10, 32, 50, 100, 400, 10_000)]
    assert found == sorted(found)
    assert [auto._reliability(count) for count, _ in auto.RELIABILITY] == [tau for _, tau in auto.RELIABILITY]


# Settings by hand


def test_settings_by_hand_are_kept_and_the_others_follow(photos):
    config, reasons = chosen(photos, "batch_size=4", "max_epochs=7", "val_images=6", "retrain.epochs=3", "flip=true")
    assert (config.train.batch_size, config.train.max_epochs, config.data.val_images) == (4, 7, 6)
    assert (config.retrain.epochs, config.data.flip, config.retrain.batch_size) == (3, True, 4)
    assert config.train.filter_images == 6  # all of them
    named = [reason.partition(" ")[0] for reason in reasons]
    assert not {"train.batch_size", "train.max_epochs", "data.val_images", "retrain.epochs"} & set(named)


def test_the_space_follows_an_image_size_and_the_size_a_space(look):
    config, _ = look(assignments=["image_size=20"])
    assert (config.space.name, config.space.image_size, config.data.pad) == ("fashion", 20, 2)
    config, reasons = look(assignments=["space=mobilenet"], side=130)
    assert (config.space.name, config.space.image_size) == ("mobilenet", 96)
    assert not any(reason.startswith("space ") for reason in reasons)
    config, _ = look(assignments=["space=fashion"], side=20)
    assert (config.space.name, config.space.image_channels, config.space.image_size) == ("fashion", 3, 20)


def test_a_space_of_the_user_is_not_changed(look, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(load_space("fashion").model_copy(update={"name": "mine"}).to_yaml())
    config, _ = look(assignments=[f"space={file}"], side=300)
    assert (config.space.name, config.space.image_size, config.space.image_channels) == ("mine", 28, 1)
    config, _ = look(assignments=[f"space={file}", "image_size=36"], side=300)
    assert (config.space.image_size, config.data.pad) == (36, 4)


def test_the_image_size_respects_a_limit_on_multiply_adds(look):
    config, reasons = look(side=400, images=2000, budget=Budget(max_macs=2_000_000))
    assert config.space.image_size == 80
    assert any("with a larger size, hardly any network has 2M multiply-adds" in reason for reason in reasons)
    _, reasons = look(side=400, images=2000, budget=Budget(max_macs=300_000_000))
    assert any("your limit of 300M multiply-adds has no effect" in reason for reason in reasons)


def test_wrong_values_are_refused_before_anything_is_read():
    with pytest.raises(GreedyNASError, match=r"train\.lr"):
        chosen("nowhere", "lr=-1")
    with pytest.raises(GreedyNASError, match="unknown setting 'batchsize'; did you mean"):
        chosen("nowhere", "batchsize=4")
    with pytest.raises(GreedyNASError, match="no such data: 'nowhere'"):
        chosen("nowhere")


def test_one_class_is_refused(tmp_path):
    paint(tmp_path, {"all": 5})
    with pytest.raises(GreedyNASError, match=r"at least two classes are needed, .* has only all"):
        chosen(tmp_path)


def test_auto_is_a_preset_like_the_others(photos, run_cli):
    assert "auto" in preset_names()
    config = load_config("auto", {"data.source": str(photos), "device": "cpu", "lr": 0.5})
    assert (config.name, config.train.lr) == ("auto", 0.5)
    assert config == load_config("auto", {"data.source": str(photos), "device": "cpu", "lr": 0.5})
    with pytest.raises(GreedyNASError, match="name the data with --data"):
        load_config("auto")


def test_pocket():
    space = load_space("pocket")
    assert space.size == 3**8
    low, high = space.cost_tables["macs"].range
    assert high > 10 * low
    narrow = [layer.in_channels for layer in space.layers if layer.stride > 1]
    assert min(narrow) >= 16  # see the file
    for size in auto.SIZES["pocket"]:
        assert space.adapt(image_size=size).layers[-1].out_size >= 3


def test_every_size_suits_its_space():
    for name, sizes in auto.SIZES.items():
        assert list(sizes) == sorted(sizes)
        assert load_space(name).adapt(image_size=sizes[0]).image_size == sizes[0]


def test_a_noisy_scan_is_grey_and_a_faint_colour_is_not(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(4):
            scan = rng.integers(0, 256, (64, 64, 1)).repeat(3, axis=2) + rng.integers(0, 2, (64, 64, 3))
            Image.fromarray(scan.clip(0, 255).astype(np.uint8)).save(tmp_path / name / f"{i}.png")
    assert look_at(DataSettings(source=str(tmp_path)), seed=0).grey
    Image.new("RGB", (64, 64), (120, 110, 100)).save(tmp_path / "a" / "sepia.png")
    assert not look_at(DataSettings(source=str(tmp_path)), seed=0).grey


@pytest.mark.usefixtures("one_thread")
def test_a_supernet_learns_with_the_chosen_settings(tmp_path):
    rng = np.random.default_rng(0)
    for number, name in enumerate(("red", "green", "blue")):
        (tmp_path / "colours" / name).mkdir(parents=True)
        for i in range(30):
            pixels = rng.integers(0, 160, (14, 17, 3))
            pixels[..., number] += 90
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "colours" / name / f"{i}.png")
    config, _ = chosen(tmp_path / "colours", "max_epochs=12", "device=cpu")
    console = Console(file=io.StringIO(), width=140)
    result = train_stage(config, tmp_path / "run", console)
    assert result["steps"] == 12 * (58 // 8)
    assert result["pool_best_loss"] < 0.5  # guessing: ln 3
    assert read_run_config(tmp_path / "run") == config
    train_stage(
        chosen(tmp_path / "colours", "max_epochs=12", "device=cpu")[0], tmp_path / "run", console
    )  # the same run
