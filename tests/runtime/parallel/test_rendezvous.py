"""Ranks that were started wrongly: all of them end in time with one line that says why."""

import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import yaml

from greedynas import GreedyNASError
from greedynas.runtime.parallel.rendezvous import VARIABLE, Place, arrive, find_place
from tests.helpers.ranks import free_port, outcome, start_by_hand, variables_of
from tests.helpers.training import SETTINGS, tiny_space


@pytest.fixture
def config(tmp_path):
    settings = {
        "space": tiny_space(repeat=1).model_dump(mode="json"),
        "train": {**SETTINGS, "max_epochs": 1, "warmup": 2},
        "data": {"workers": 0, "pad": 1, "val_images": 12, "test_images": 6},
    }
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def refused(ranks, seconds=60, **more):
    """Return the messages of all ranks, and check that each ends with at most one line."""
    codes, _, said = outcome(start_by_hand(ranks, **more), seconds)
    assert codes == [2] * len(ranks), said
    assert all(message.startswith("error: ") and message.count("\n") <= 1 for message in said if message), said
    return said


# Other commands


@pytest.mark.parametrize("other", [("--seed", "5"), ("--out", "elsewhere")])
def test_ranks_with_other_commands_are_refused(config, photos, tmp_path, other):
    first = ["greedynas", "train", config, "--data", photos, "--out", tmp_path / "run"]
    for message in refused([{"arguments": first}, {"arguments": [*first, *other]}]):  # each has a terminal of its own
        assert "rank 1 has a different command from rank 0" in message
        assert f"{' '.join(other)} on rank 1, " in message
        assert "start all ranks with the same command" in message
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_files_or_another_directory_are_refused(config, photos, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        shutil.copy(config, folder)
    command = ["greedynas", "train", "tiny.yaml", "--data", photos, "--out", "run"]
    ranks = [{"arguments": command, "cwd": here}, {"arguments": command, "cwd": there}]
    assert (
        f"rank 1 has a different run directory from rank 0: {there / 'run'} on rank 1, {here / 'run'} on rank 0"
        in "".join(refused(ranks))
    )
    settings = yaml.safe_load(config.read_text())
    settings["train"]["lr"] = 0.77
    (there / "tiny.yaml").write_text(yaml.safe_dump(settings))
    assert "rank 1 has a different train.lr from rank 0: 0.77 on rank 1, " in "".join(refused(ranks))
    assert not (here / "run").exists()


# Other numbers


def meeting(places, seconds=5.0, late=()):
    """Return the outcome for each process: None, or why it is refused."""
    store = torch.distributed.HashStore()

    def come(number):
        time.sleep(0.3 if number in late else 0)
        try:
            arrive(store, Place(*places[number], 0, 1, "host", 1), time.monotonic() + seconds)
        except GreedyNASError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(come, range(len(places))))


def test_all_ranks_meet():
    assert meeting([(0, 3), (1, 3), (2, 3)], late=(0,)) == [None] * 3


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(0, 3), (1, 3), (1, 3)], "RANK 1 was given to 2 processes: give each rank once"),
        ([(0, 2), (5, 2)], "a process has RANK 5, but with WORLD_SIZE 2 there are ranks 0 to 1"),
        ([(0, 2), (-1, 2)], "a process has RANK -1, but"),
        ([(0, 2), (1, 3)], "rank 1 has WORLD_SIZE 3, rank 0 has 2"),
    ],
)
def test_wrong_numbers_are_reported_to_all_ranks(places, message):
    start = time.monotonic()
    for said in meeting(places):
        assert said is not None
        assert message in said
    assert time.monotonic() - start < 4


def test_a_missing_rank_is_named(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    for said in meeting([(0, 4), (2, 4)], seconds=1.0):
        assert said is not None
        assert "rank 1, 3 of 4 did not arrive within 1 s" in said


def test_a_second_process_of_a_rank_that_arrives_late_is_refused():
    said = meeting([(0, 2), (1, 2), (1, 2)], late=(2,))
    assert said[:2] == [None, None]
    assert said[2] == "RANK 1 was given to two processes; this is the second one"


def test_without_rank_0_the_others_do_not_wait_forever(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr("greedynas.runtime.parallel.rendezvous.FAREWELL", 0.5)
    (said,) = meeting([(1, 2)], seconds=1.0)
    assert said is not None
    assert "has waited 1 s for rank 0" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "first"}, "RANK is 'first', which is not a whole number"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 0, which is not a port"),
        ({"LOCAL_RANK": None}, "RANK and WORLD_SIZE are set, but not LOCAL_RANK"),
    ],
)
def test_the_environment_is_checked(monkeypatch, changes, message):
    for name, value in {**variables_of(2)[1], **changes}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(GreedyNASError, match=message):
        find_place()


def test_a_taken_port_and_a_wrong_rank_are_reported_in_time(config, photos, tmp_path):
    """Check a port of another program, whose answer PyTorch's own client would wait for forever."""
    command = {"arguments": ["greedynas", "train", config, "--data", photos, "--out", tmp_path / "run"]}
    quick = {**command, "env": {VARIABLE: "6"}}
    start = time.monotonic()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(8)
        port = other.getsockname()[1]
        said = refused([quick, quick], port=port)
    assert f"rank 0 cannot use 127.0.0.1:{port}" in said[0]
    assert (
        f"the program that listens at 127.0.0.1:{port} (MASTER_ADDR and MASTER_PORT) is not rank 0 of this run"
        in said[1]
    )
    said = refused([command, {**command, "env": {"RANK": "7"}}], port=free_port())
    assert all("a process has RANK 7" in message for message in said)
    assert time.monotonic() - start < 50
