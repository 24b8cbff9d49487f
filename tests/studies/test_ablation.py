"""Net1 to Net6 of the paper's Table 4 on a tiny space."""

import json

import numpy as np
import pytest
import yaml
from rich.console import Console

from greedynas.spaces.budget import Budget
from greedynas.studies.ablation.run import NETS, PAIRS, ablation_parts, ablation_study, study_ablation
from greedynas.studies.contests import Options
from greedynas.studies.study import run_parts
from tests.helpers.methods import SMALL, write_config

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    """Run a small study; return its folder, the config file and the results."""
    home = tmp_path_factory.mktemp("ablation")
    # With α = 1 a full pool is always steady, so the nets that may stop do so early.
    train = {**SMALL["train"], "stopping": True, "alpha": 1.0, "max_epochs": 4, "pool_size": 4}
    file = write_config(home / "tiny.yaml", train=train)
    options = Options(str(file), {"data.source": str(photos)}, Budget(max_macs=60_000), seeds=(0, 1), jobs=1)
    return home / "study", file, study_ablation(home / "study", options, Console(quiet=True))


def test_the_switches_are_those_of_the_paper(finished):
    """Compare the switches with the rows of Table 4."""
    folder, _, study = finished
    switches = {
        row["contestant"]: "".join(
            "✓" if row[key] else "-" for key in ("filtering", "sampling", "initialisation", "stopping")
        )
        for row in study["results"]["rows"]
    }
    assert switches == {"Net1": "----", "Net2": "✓---", "Net3": "-✓✓✓", "Net4": "✓✓-✓", "Net5": "✓✓✓-", "Net6": "✓✓✓✓"}
    for name, net in NETS.items():
        part = json.loads((folder / "parts" / f"{net.supernet}-0.json").read_text())
        train = part["settings"]["config"]["train"]
        expected = (net.filtering, net.sampling, net.stopping)
        assert (train["filtering"], train["pool_sampling"], train["stopping"]) == expected, name
        search = part["result"]["searches"][net.search.name]
        assert (search["from_pool"] > 0) == net.initialisation, name


def test_net4_and_net6_share_a_supernet(finished):
    folder, _, study = finished
    supernets = [file for file in (folder / "parts").glob("*.json") if not file.name.startswith("net-")]
    assert len(supernets) == 2 * 5
    rows = {(row["contestant"], row["seed"]): row for row in study["results"]["rows"]}
    assert len(rows) == 2 * 6
    for seed in (0, 1):
        assert rows["Net4", seed]["corrected_images"] == rows["Net6", seed]["corrected_images"]


def test_a_study_takes_the_most_accurate_network_of_a_search(finished):
    """Check that no tolerance applies, unlike in the search stage, which takes the cheapest of equal networks."""
    folder, _, _ = finished
    for net in NETS.values():
        for seed in (0, 1):
            part = json.loads((folder / "parts" / f"{net.supernet}-{seed}.json").read_text())
            accuracies = np.load(folder / "parts" / f"{net.supernet}-{seed}.npz")[f"{net.search.name}_accuracy"]
            chosen = part["result"]["searches"][net.search.name]["chosen"]
            assert chosen["supernet_accuracy"] == accuracies.max()


def test_only_nets_with_stopping_stop_and_cost_less(finished):
    _, _, study = finished
    for row in study["results"]["rows"]:
        name = row["contestant"]
        assert (row["evaluation_images"] == 0) == (name == "Net1")  # which has no pool
        assert row["macs"] <= 60_000
        assert (row["epochs"] < row["max_epochs"]) == NETS[name].stopping, name
    by_name = {row["contestant"]: row for row in study["results"]["rows"] if row["seed"] == 0}
    assert by_name["Net5"]["corrected_images"] > by_name["Net6"]["corrected_images"]


def test_the_papers_comparisons_are_paired_by_seed(finished):
    folder, _, study = finished
    found = {(one["ours"], one["theirs"]): one for one in study["results"]["differences"]}
    assert list(found) == list(PAIRS)
    top1 = {(row["contestant"], row["seed"]): row["top1"] for row in study["results"]["rows"]}
    for (ours, theirs), one in found.items():
        assert one["mean"] == pytest.approx(np.mean([top1[ours, seed] - top1[theirs, seed] for seed in (0, 1)]))
    printed = (folder / "study.html").read_text()
    for text in ("Table 4", "74.89", "+0.41", "Net6 − Net4: a search that starts from the pool", "verdict"):
        assert text in printed
    clear = [one["verdict"] for one in found.values() if one["verdict"] in ("better", "worse")]
    assert bool(clear) == ("better" in study["title"] or "worse" in study["title"])


def test_repeating_the_command_gives_the_same_results(finished, photos, run_cli):
    folder, file, study = finished
    command = ["study", "ablation", file, "--data", photos, "--flops", "60K", "--seeds", 2, "--out", folder, "--json"]
    code, out, err = run_cli(*command)
    assert (code, err.count("already")) == (0, 3)  # Net5's parts are separate
    assert json.loads(out)["results"] == study["results"]
    code, out, err = run_cli(*command, "--set", "alpha=0.5")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "config.train.alpha is 1.0 there, 0.5 here" in err


def test_net5_is_not_trained_again_if_net6_never_stopped(photos, tmp_path):
    """Check the results of Net5, whose training is identical to Net6's if that was never stopped early."""
    train = {**SMALL["train"], "stopping": True, "alpha": 0.0, "max_epochs": 2, "pool_size": 4}
    file = write_config(tmp_path / "tiny.yaml", train=train)
    options = Options(str(file), {"data.source": str(photos)}, Budget(max_macs=60_000), seeds=(0,), jobs=1)
    study = study_ablation(tmp_path / "study", options, Console(quiet=True))
    net5, net6 = study["results"]["rows"][-2:]
    assert net5["epochs"] == net6["epochs"] == 2
    assert {key for key in net5 if net5[key] != net6[key]} == {"contestant", "stopping"}
    spared = ablation_parts(options)[-1]
    assert not (tmp_path / "study" / "parts" / f"{spared.name}.json").exists()
    trained = run_parts(tmp_path / "study", [spared], Console(quiet=True), 1)[spared.name].result
    chosen = trained["searches"]["from-pool"]["chosen"]
    assert " ".join(chosen["ops"]) == net5["ops"]
    assert chosen["supernet_accuracy"] == net5["supernet_accuracy"]
    assert trained["corrected_images"] == net5["corrected_images"]


def made_up_study(noise, seeds):
    """Return the study of the paper's numbers with some noise."""
    rng = np.random.default_rng(0)
    rows = []
    for name, net in NETS.items():
        for seed in range(seeds):
            row = {"contestant": name, "seed": seed, "epochs": 4, "max_epochs": 4, "searched_accuracy": 0.5}
            top1 = net.paper + noise * rng.normal()
            rows.append({**row, "top1": top1, "retrainings": [top1]})
    settings = {
        "seeds": list(range(seeds)),
        "retrain_seeds": 1,
        "ground_truth": True,
        "max_epochs": 4,
        "space": "macro",
    }
    return ablation_study(rows, {"Net6": [0.5], "Net4": [0.5]}, settings, [])


def test_the_title_claims_only_what_the_spread_supports():
    study = made_up_study(0, 1)
    assert study.title == "Ablation: one seed cannot show a difference"
    assert "replaces retraining" in study.lead
    assert "ground truth" in study.tables[0].columns[5]
    assert [row[2] for row in study.tables[1].rows][:5] == [
        "+0.28",
        "+0.41",
        "+0.30",
        "+0.18",
        "+0.05",
    ]  # the paper's own
    clear = made_up_study(0.02, 5).title
    assert "filtering, with the pool: better (+0.4" in clear
    assert "stopping" not in clear  # 0.05 is small compared with this noise
    assert made_up_study(3, 5).title == "Ablation: no difference that this spread can show"


def test_every_use_of_the_pool_is_off_in_net1(tmp_path, photos):
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "space": "fashion"}))
    parts = ablation_parts(Options(str(file), {}, Budget(), seeds=(7,)))
    assert [part.name for part in parts] == [
        "plain-7",
        "filter-7",
        "pool-stop-7",
        "filter-pool-stop-7",
        "filter-pool-7",
    ]
    assert parts[3].settings["searches"] == [
        {"name": "from-random", "searcher": "evolution", "pool_init": False},
        {"name": "from-pool", "searcher": "evolution", "pool_init": True},
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "Net3.lr=0.1"], "unknown setting 'Net3.lr'"),
        (["--set", "uniform.lr=0.1"], "unknown setting 'uniform.lr'"),
        (["--truth", "nosuch.json"], "the ground truth is that of space macro, not of tiny"),
        (["--params", "7"], "no path has params of at most 7"),
    ],
)
def test_wrong_input_gives_a_one_line_error(run_cli, photos, tmp_path, options, message):
    file = write_config(tmp_path / "tiny.yaml")
    code, out, err = run_cli("study", "ablation", file, "--data", photos, "--out", tmp_path / "study", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not (tmp_path / "study").exists()
