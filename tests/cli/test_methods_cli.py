"""A job with a method that learns probabilities of ops, by the commands of the command line."""

import json

import pytest
import yaml

from tests.helpers.methods import SMALL
from tests.helpers.training import SETTINGS, tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(tmp_path, photos):
    space = tiny_space(["ID", "MB2_K3", "MB4_K5"]).model_dump(mode="json")
    train = {**SETTINGS, "warmup": 2, "max_epochs": 2}
    data = {**SMALL["data"], "source": str(photos)}
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "space": space, "train": train, "data": data}))
    return file


@pytest.mark.parametrize("method", ["fbnet", "single-path"])
def test_train_search_retrain_and_export(method, config, tmp_path, run_cli):
    run = tmp_path / "run"
    target = ["--set", "train.target={max_macs: 30000}"]
    code, out, err = run_cli("train", config, "--out", run, "--sampler", method, *target)
    assert code == 0, err
    code, out, err = run_cli("search", run, "--flops", "30K", "--flops", "27K", "--json")
    assert code == 0, err
    found = json.loads(out)["searches"]
    assert [search["searcher"] for search in found] == ["derivation", "derivation"]
    assert [search["name"] for search in found] == ["macs-30K", "macs-27K"]
    assert [search["chosen"]["macs"] <= limit for search, limit in zip(found, (30_000, 27_000), strict=True)] == [
        True
    ] * 2
    code, out, err = run_cli(
        "search",
        run,
        "--flops",
        "30K",
        "--searcher",
        "evolution",
        "--json",
        "--set",
        "population=6",
        "--set",
        "generations=2",
    )
    assert code == 0, err
    assert json.loads(out)["searches"][0]["name"] == "macs-30K-evolution"
    code, out, err = run_cli("retrain", run, "--model", "macs-30K", "--json")
    assert code == 0, err
    code, out, err = run_cli("export", run, "--model", "macs-30K", "--format", "safetensors", "--json")
    assert code == 0, err
    # The same commands again find everything done.
    code, out, err = run_cli("search", run, "--flops", "30K", "--json")
    assert code == 0, err
    assert json.loads(out)["searches"][0]["found"] == found[0]["found"]


def test_run_derives_the_network(config, tmp_path, run_cli):
    settings = ["--set", "train.sampler=mdenas", "--set", "retrain.epochs=1"]
    code, _, err = run_cli("run", config, "--out", tmp_path / "run", "--flops", "30K", *settings, "--json")
    assert code == 0, err
    search = json.loads((tmp_path / "run/searches/macs-30K/search.json").read_text())
    assert (search["searcher"], len(search["found"])) == ("derivation", 1)
    assert (tmp_path / "run/report.html").stat().st_size > 10**6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "CONFIG", "--out", "RUN", "--sampler", "dart"], "unknown sampler 'dart'"),
        (["train", "CONFIG", "--out", "RUN", "--set", "train.target={max_macs: 30M, min_macs: 1}"], "target"),
        (["train", "CONFIG", "--out", "RUN", "--sampler", "darts", "--set", "train.target={max_macs: 10}"], "no path has macs of at most 10"),
        (
            ["train", "CONFIG", "--out", "RUN", "--sampler", "proxyless", "--set", "experimental.split_after_identity=true"],
            "proxyless mixes the ops of a layer, which have several weights",
        ),
        (["train", "CONFIG", "--out", "RUN", "--sampler", "single-path", "--set", "space=shufflenet"], "single-path decides about"),
        (
            ["train", "CONFIG", "--out", "RUN", "--sampler", "darts", "--set", "train.target={max_latency_ms: 1}", "--set", "train.latency_table=no.json"],
            "no.json",
        ),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_and_leaves_nothing(arguments, told, config, tmp_path, run_cli):
    places = {"CONFIG": config, "RUN": tmp_path / "run"}
    code, _, err = run_cli(*(places.get(word, word) for word in arguments))
    assert code == 2
    assert told in " ".join(err.split())
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_front_and_derivation_exclude_each_other(config, tmp_path, run_cli):
    run = tmp_path / "run"
    assert run_cli("train", config, "--out", run, "--sampler", "mdenas")[0] == 0
    code, _, err = run_cli("search", run, "--front", "--searcher", "derivation")
    assert code == 2
    assert "for --front, use evolution" in " ".join(err.split())
    code, out, err = run_cli("search", run, "--front", "--json", "--set", "population=6", "--set", "generations=2")
    assert code == 0, err
    assert json.loads(out)["searches"][0]["searcher"] == "evolution"


@pytest.mark.parametrize("method", ["darts", "proxyless", "single-path"])
def test_training_in_bf16(method, config, tmp_path, run_cli):
    run = tmp_path / "run"
    code, _, err = run_cli("train", config, "--out", run, "--sampler", method, "--set", "precision=bf16")
    assert code == 0, err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    learned = [row["probabilities"] for row in rows if row["kind"] == "epoch"]
    assert learned[0] != learned[1]
