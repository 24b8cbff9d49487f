"""An untrusted run directory causes no writes outside of itself and no downloads."""

import shutil
from pathlib import Path

import pytest
import yaml

from greedynas import GreedyNASError
from greedynas.data.settings import DataOptions, DataSettings, stored_settings
from greedynas.jobs.resolving import load_config
from greedynas.stages.run import read_run_config
from tests.fuzz.kinds import make_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(photos, tmp_path_factory):
    from tests.fuzz.make_corpus import call

    def run_cli(*command):
        code, output = call([str(part) for part in command])
        return code, "", output

    return make_run(tmp_path_factory.mktemp("fetching"), photos, run_cli)


def forged(base, tmp_path, **data):
    """Create a run with changed settings for its images, like one from an untrusted source."""
    run = shutil.copytree(base, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"] |= data
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


def content(folder):
    return {
        str(file): file.stat().st_mtime_ns for file in folder.rglob("*") if "run" not in file.relative_to(folder).parts
    }


COMMANDS = {
    "search": ("search", "{run}", "--flops", "50K"),
    "retrain": ("retrain", "{run}", "--name", "again"),
    "export": ("export", "{run}", "--format", "safetensors"),
    "study": ("study", "ranking", "{run}", "--paths", "30", "--jobs", "1"),
    "methods": ("study", "methods", "{run}", "--flops", "50K", "--out", "{run}/study", "--jobs", "1"),
    "train": ("train", "{run}/config.yaml", "--out", "{run}/other"),
    "plan": ("train", "{run}/config.yaml", "--plan"),
    "auto": ("run", "auto", "--data", "torch/cifar10", "--out", "{run}", "--flops", "5M"),
}


@pytest.fixture
def no_network(monkeypatch):
    """Record all attempts to use the network."""
    asked = []

    def fetch(*arguments, **_):
        asked.append(arguments)
        raise RuntimeError("no network here")

    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", fetch)
    monkeypatch.setattr("urllib.request.urlopen", fetch)
    return asked


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_directory_cannot_cause_downloads(base, run_cli, tmp_path, monkeypatch, no_network, command):
    elsewhere = tmp_path / "elsewhere" / "deep"
    run = forged(base, tmp_path, source="torch/cifar10", root=str(elsewhere), download=True)
    if command == "auto":
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["asked"] = {"preset": "auto", "hours": None, "changes": {"data.source": "torch/cifar10"}}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    before = content(tmp_path)
    code, _, output = run_cli(*(part.replace("{run}", str(run)) for part in COMMANDS[command]))
    assert (code, output.count("\n")) == (2, 1), output
    assert "torch/cifar10" in output
    assert no_network == []
    assert content(tmp_path) == before


@pytest.mark.parametrize("command", ["search", "retrain", "export", "study", "methods", "plan"])
@pytest.mark.parametrize("source", ["hfds/somebody/something", "tfds/mnist", "torch/imagenet"])
def test_sets_that_their_packages_would_fetch_are_refused(base, run_cli, tmp_path, monkeypatch, source, command):
    run = forged(base, tmp_path, source=source, root=str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    before = content(tmp_path)
    code, _, output = run_cli(*(part.replace("{run}", str(run)) for part in COMMANDS[command]))
    assert (code, output.count("\n")) == (2, 1), output
    assert f"add --data {source} --data-root {tmp_path / 'elsewhere'} to the command" in output
    assert content(tmp_path) == before


def test_the_command_line_may_name_such_sets(tmp_path):
    def stored(options, **data):
        return stored_settings(DataSettings(**data), options, "run")

    hugging = {"source": "hfds/a/b", "root": "there"}
    assert stored(DataOptions("hfds/a/b", "there"), **hugging).root == "there"
    assert stored(DataOptions("hfds/a/b"), source="hfds/a/b").source == "hfds/a/b"
    for options in (DataOptions(), DataOptions("hfds/a/b"), DataOptions(root="there")):
        with pytest.raises(GreedyNASError, match="add --data hfds/a/b --data-root there"):
            stored(options, **hugging)
    assert stored(DataOptions("torch/cifar10", None, True), source="torch/cifar10").download
    with pytest.raises(GreedyNASError, match="add --data torch/cifar10 --data-root there"):
        stored(DataOptions("torch/cifar10", None, True), source="torch/cifar10", root="there")
    # Sets that are only read need no permission.
    for source in ("photos/", "torch/cifar10", "wds/x", "fashion"):
        assert not stored(DataOptions(), source=source, root="there", download=True).download
    (tmp_path / "train").mkdir()
    (tmp_path / "meta.bin").touch()
    assert stored(DataOptions(), source="torch/imagenet", root=str(tmp_path)).root == str(tmp_path)


def test_a_download_needs_the_option_of_the_command_that_trains(base, run_cli, tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(tmp_path)
    command = ["train", base.parent / "tiny.yaml", "--data", "torch/cifar10", "--out", tmp_path / "run"]
    code, _, output = run_cli(*command, "--set", "data.download=true")
    assert code == 2
    assert no_network != [], output
    run = forged(base, tmp_path, source="torch/cifar10", download=True)
    assert not read_run_config(run).data.download
    assert not load_config(run / "config.yaml").data.download
    with pytest.raises(GreedyNASError, match="add --data torch/cifar10"):
        load_config(run / "config.yaml", {"data.download": True})
    assert load_config(run / "config.yaml", {"data.download": True, "data.source": "torch/cifar10"}).data.download


def test_moved_images_can_be_named(base, photos, run_cli, tmp_path):
    moved = shutil.copytree(photos, tmp_path / "moved")
    run = forged(base, tmp_path, source=str(tmp_path / "gone"))
    assert run_cli("search", run, "--flops", "50K")[0] == 2
    code, _, output = run_cli("search", run, "--flops", "50K", "--data", moved)
    assert code == 0, output


def test_a_study_does_not_follow_links_out_of_the_run(base, run_cli, tmp_path):
    run = shutil.copytree(base, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (run / "studies").symlink_to(tmp_path / "elsewhere")
    code, _, output = run_cli("study", "ranking", run, "--paths", "30", "--jobs", "1")
    assert (code, output.count("\n")) == (2, 1), output
    assert "is a link out of the run directory" in output
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_teacher_is_a_network_of_the_run(base, run_cli, tmp_path):
    run = shutil.copytree(base, tmp_path / "run")
    for name in ("..", "../../secret", "/etc", "\x00", "a/b"):
        code, _, output = run_cli("retrain", run, "--name", "again", "--teacher", name)
        assert (code, output.count("\n")) == (2, 1), output
    assert not (Path(run).parent / "secret").exists()
