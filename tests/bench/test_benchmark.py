import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from greedynas import GreedyNASError, load_space
from greedynas.bench import benchmark as bench
from greedynas.bench import measures as bench_measures
from greedynas.bench.benchmark import BenchSettings, config_for, make_work, measure_variant, run_bench
from greedynas.bench.cost import (
    RECORDED,
    Rates,
    cost_facts,
    imagenet_supernets,
    rates_in,
    read_record,
    recorded_need,
    training_rates,
)
from greedynas.bench.data import Feed, Need, forget, loader_rate, measure_feed, repeated_rate, verdict
from greedynas.bench.floor import TRAINING, copy_bandwidth, stem_traffic, traffic_table
from greedynas.bench.measures import Measurement, choose_paths, ranking
from greedynas.bench.record import Row, ratio
from greedynas.bench.tables import show_bench
from greedynas.bench.variants import VARIANTS, Subject, choose_variants, why_not
from greedynas.greedy.evaluation import evaluate_paths
from greedynas.runtime.rng import stream
from greedynas.spaces.costs import tree_cost
from tests.helpers.paths import ROOT
from tests.helpers.training import tiny_space

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NAMES = ("fp32", "fp16", "bf16", "fp32-nhwc", "bf16-nhwc", "compiled", "greedynas")
QUICK = BenchSettings(batch=4, steps=2, seconds=0.05, device="cpu", apart=False)
BY_NAME = {variant.name: variant for variant in VARIANTS}


@pytest.fixture(scope="module")
def space_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("space") / "tiny.yaml"
    file.write_text(tiny_space(repeat=1).to_yaml())
    return file


@pytest.fixture(scope="module")
def work(space_file):
    return make_work(*config_for(str(space_file), QUICK), CPU)


@pytest.fixture(scope="module")
def recorded(space_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "bench.json"
    return run_bench([str(space_file)], QUICK, Console(quiet=True), out), out


def shown(record):
    console = Console(width=160, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    show_bench(record, console)
    return console.export_text()


# Records


def test_every_variant_and_measure_has_a_row(recorded):
    record, out = recorded
    assert json.loads(out.read_text()) == record
    assert {"name", "device", "cores", "copy_bytes_per_second", "versions"} <= record["machine"].keys()
    space = record["spaces"]["tiny"]
    assert (space["batch"], space["image_size"]) == (4, 8)
    rows = {(row["measure"], row["variant"]): row for row in space["rows"]}
    measures = {measure: {variant for one, variant in rows if one == measure} for measure in bench.MEASURES}
    assert measures["train"] == measures["forward"] == set(NAMES)
    assert measures["filter"] == set(NAMES) - {"compiled"}  # with one path there is nothing to rank
    assert measures["rank"] == measures["filter"] | {"toolkits"}
    for (_, variant), row in rows.items():
        assert row["error"] is None
        reason = why_not(BY_NAME[variant], CPU)
        assert row["skipped"] == reason
        assert ("ms" in row) == (reason is None)
    assert "CPU" in rows["train", "compiled"]["skipped"]
    assert [row["error"] for row in space["data"]] == [None, None]
    assert all(row["images_per_second"] > 0 for row in space["data"])


def test_the_numbers_of_a_row_are_consistent(recorded):
    rows = {(row["measure"], row["variant"]): row for row in recorded[0]["spaces"]["tiny"]["rows"] if "ms" in row}
    for (measure, _), row in rows.items():
        times = list(row["times_ms"].values())
        assert row["ms"] == pytest.approx(np.median(times))
        assert row["images_per_second"] == pytest.approx(1000 * row["images"] / row["ms"])
        assert row["times_floor"] == pytest.approx(row["ms"] / row["floor_ms"])
        for key, other in (("ratio_to_fp32", "fp32"), ("ratio_to_bf16_nhwc", "bf16-nhwc")):
            base = rows[measure, other]["times_ms"]
            common = base.keys() & row["times_ms"].keys()
            wanted = sum(base[number] for number in common) / sum(row["times_ms"][number] for number in common)
            assert row[key] == pytest.approx(wanted)
    assert rows["train", "fp32"]["ratio_to_fp32"] == 1
    assert rows["filter", "fp32"]["images"] == 10 * 16
    assert rows["rank", "fp32"]["images"] == recorded[0]["spaces"]["tiny"]["ranked"] * 16
    assert rows["train", "fp32"]["floor_ms"] == pytest.approx(TRAINING * rows["forward", "fp32"]["floor_ms"], rel=1)


def test_the_table_has_all_measures_and_variants(recorded):
    text = shown(recorded[0])
    for variant in VARIANTS:
        assert variant.label in text
    for part in ("tiny, 8 px, batch 4", "training step", "forward evaluation", "filtering", "ranking", "× floor"):
        assert part in text
    assert "compiling is left out on a CPU" in text
    assert "images from memory, on the CPU" in text


def test_a_failing_variant_does_not_stop_others(space_file, monkeypatch):
    plain = bench.MEASURES["train"]

    def training(subject, work):
        if subject.variant.name == "fp32":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if subject.variant.name == "bf16":
            raise RuntimeError("no\ncompiler")
        return plain(subject, work)

    monkeypatch.setitem(bench.MEASURES, "train", training)
    settings = replace(QUICK, measures=("train", "forward"), variants=("fp32", "bf16", "greedynas"))
    record = run_bench([str(space_file)], settings, Console(quiet=True))
    rows = {(row["measure"], row["variant"]): row for row in record["spaces"]["tiny"]["rows"]}
    assert rows["train", "fp32"]["error"] == "out of memory: use a smaller --batch"
    assert rows["train", "bf16"]["error"] == "RuntimeError: no compiler"
    assert rows["train", "greedynas"]["ms"] > 0
    assert rows["train", "greedynas"]["ratio_to_fp32"] is None  # the baseline failed
    assert rows["forward", "fp32"]["ms"] > 0
    text = shown(record)
    assert "failed" in text
    assert "fp32, NCHW (training step): out of memory" in text


def test_no_measure_is_started_when_the_total_time_has_run_out(work, space_file):
    rows = measure_variant(BY_NAME["fp32"], work, ("train", "rank"), {}, over=0.0)
    assert [(row.measure, row.found, row.skipped) for row in rows] == [
        (measure, None, "the total time had run out (--total)") for measure in ("train", "rank")
    ]
    settings = replace(QUICK, total=1e-6, measures=("forward",), variants=("fp32", "greedynas"))
    record = run_bench([str(space_file)], settings, Console(quiet=True))
    assert [row["variant"] for row in record["spaces"]["tiny"]["rows"]] == ["fp32", "greedynas"]
    assert "left out" in shown(record)


def test_variants_that_are_left_out_on_each_machine(monkeypatch):
    assert all(why_not(variant, GPU) is None for variant in VARIANTS)
    monkeypatch.setattr("greedynas.bench.variants._cpu_has_fp16", lambda: False)
    assert {variant.name for variant in VARIANTS if why_not(variant, CPU)} == {"fp16", "compiled"}
    monkeypatch.setattr("greedynas.bench.variants._cpu_has_fp16", lambda: True)
    assert {variant.name for variant in VARIANTS if why_not(variant, CPU)} == {"compiled"}


def test_sizes_are_realistic_on_a_gpu_and_small_on_a_cpu():
    for name, batch, size, ranked in (("mobilenet", 512, 224, 10), ("macro", 256, 32, 6561)):
        space = load_space(name)
        config, here = config_for(name, BenchSettings(device="cpu"))
        there = bench.choose_sizes(space, BenchSettings(), gpu=True)
        assert (there.batch, there.image_size, there.ranked, there.steps) == (batch, size, ranked, 50)
        assert here.batch <= 16
        assert here.image_size <= 64
        assert config.train.m == 10  # from the preset


# The variants


def test_variants_are_chosen_by_name():
    assert [variant.name for variant in choose_variants([])] == ["toolkits", *NAMES]
    assert [variant.name for variant in choose_variants(["greedynas", "fp32"])] == ["fp32", "greedynas"]
    with pytest.raises(GreedyNASError, match="unknown variant 'fp8'"):
        choose_variants(["fp8"])


@pytest.mark.parametrize(("name", "last"), [("fp32", False), ("bf16-nhwc", True), ("greedynas", True)])
def test_the_memory_format_is_kept_throughout(work, name, last):
    """Images in channels_last would turn an NCHW network into an NHWC one."""
    subject = Subject(BY_NAME[name], work.config, CPU, work.paths[0])
    data = subject.see(work.data)
    for images, _ in (next(data.train.train_batches(0, 4)), data.val.eval_batch(np.arange(4))):
        assert images.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        out = subject.net.stem(images)
        assert out.is_contiguous(memory_format=torch.channels_last) == last


def test_the_compiled_path_has_the_weights_of_the_supernet(work, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda network: compiled.append(network) or network)
    subject = Subject(BY_NAME["compiled"], work.config, CPU, work.paths[0])
    subject.precision = subject.eval_precision = "fp32"
    images, labels = work.data.val.eval_batch(np.arange(8))
    wanted = evaluate_paths(subject.net, [work.paths[0]], images, labels).losses
    assert subject.evaluate([work.paths[0]], images, labels, 8) == pytest.approx(wanted, rel=1e-5)
    before = [p.clone() for p in compiled[0].parameters()]
    subject.step()(images, labels, [work.paths[0]], 0.5)
    assert any(not torch.equal(a, b) for a, b in zip(before, compiled[0].parameters(), strict=True))
    monkeypatch.setattr(bench, "why_not", lambda *_: None)
    rows = measure_variant(BY_NAME["compiled"], work, ("train", "forward", "filter"), slow := {})
    assert [(row.measure, row.error, row.found.paths) for row in rows] == [("train", "", 1), ("forward", "", 1)]
    assert slow == {}


def test_slow_compilation_is_done_for_only_one_space(work):
    slow = {}
    row = Row("train", BY_NAME["compiled"], Measurement(4, {0: 0.1}, {0: 0.1}, startup=63.0))
    bench._note_slow(row, work, slow)
    assert "compiling one path of tiny took 63 s" in slow["compiled"]
    rows = measure_variant(BY_NAME["compiled"], work, ("train",), slow)
    assert rows[0].found is None


# The measures


def test_paths_are_distinct_and_the_first_has_median_cost():
    config, _ = config_for("macro", BenchSettings(device="cpu"))
    paths = choose_paths(config, 21)
    assert len(set(paths)) == 21
    costs = config.space.costs(np.array(paths)).macs
    assert costs[0] == np.median(costs)


def test_short_steps_are_timed_in_groups(work, monkeypatch):
    """Small images on a GPU are timed so: every batch is augmented, and the paths have been run before."""
    monkeypatch.setattr(bench_measures, "worth_timing_together", lambda _: True)
    monkeypatch.setattr(bench_measures, "GROUP", 3)
    subject = Subject(BY_NAME["fp32"], work.config, CPU, work.paths[0])
    steps = []
    make = subject.step

    def step():
        plain = make()
        return lambda images, labels, paths, lr: (
            steps.append((images.sum().item(), paths[0])) or plain(images, labels, paths, lr)
        )

    subject.step = step
    found = bench_measures.training_step(subject, replace(work, seconds=5.0))
    assert found.paths == len(work.paths)
    assert len(found.stalls) == len(work.paths) - 1
    assert found.seconds.keys() == found.floors.keys() == {0, 1, 2}
    single, grouped = steps[:-9], steps[-9:]
    assert {path for _, path in grouped} == {path for _, path in single} == set(work.paths)
    assert len({total for total, _ in steps}) > 3  # different images


def test_ratios_use_the_paths_that_both_variants_ran():
    base = Measurement(4, {0: 2.0, 1: 6.0, 2: 100.0}, {})
    assert ratio(base, Measurement(4, {0: 1.0, 1: 1.0}, {})) == 4
    assert ratio(None, base) is None


def test_a_ranking_is_projected_from_a_part_of_the_tree(work, monkeypatch):
    monkeypatch.setattr(bench_measures, "SUBTREE", 3)
    space = work.config.space
    everything = np.indices(space.num_ops).reshape(len(space.layers), -1).T
    ranked = replace(work, ranked=everything, rank_images=16, seconds=0.0)
    subject = Subject(BY_NAME["fp32"], work.config, CPU, work.paths[0])
    seen = []
    plain = subject.evaluate
    subject.evaluate = lambda paths, *rest: seen.append([*map(tuple, paths)]) or plain(paths, *rest)
    found = ranking(subject, ranked)
    assert found.note == "projected from 3 paths on 16 images"
    assert {len({path[:-1] for path in paths}) for paths in seen} == {1}  # one prefix
    assert found.images == len(everything) * 16
    in_full = ranking(subject, replace(ranked, seconds=100.0))
    assert in_full.note == ""
    assert len(seen[-1]) == len(everything)


# The floor


def test_the_traffic_of_a_block_is_the_inputs_and_outputs_of_its_convolutions():
    space = tiny_space(["ID", "MB2_K3"], repeat=1)  # 8 px, stem /2 to 4 px with 8 channels, then 8 at 4 px, 12 at 2 px
    table = traffic_table(space)
    hidden = 16 * 16
    assert table.entries[0].tolist() == [0, (128 + hidden) + (hidden + hidden) + (hidden + 128)]
    small = 16 * 4
    assert table.entries[1].tolist() == [8 * 16 + 12 * 4, (128 + hidden) + (hidden + small) + (small + 48)]
    assert stem_traffic(space) == 3 * 64 + 8 * 16
    assert table.fixed - stem_traffic(space) == 12 * 4 + 16 * 4


def test_the_floor_of_the_paper_s_space():
    """On an H200 (4.25 TB/s, batch 512, bf16) it is about 3.6 ms for a forward pass and 11 ms for a training step."""
    space = load_space("mobilenet")
    values = traffic_table(space)(space.sample(200, stream(0, "test"))).mean()
    assert 3.4 < 1e3 * 512 * 2 * values / 4.25e12 < 4.0
    assert 10 < TRAINING * 1e3 * 512 * 2 * values / 4.25e12 < 12


def test_a_tree_costs_each_prefix_once():
    space = tiny_space(["ID", "MB2_K3"], repeat=1)
    table, stem = traffic_table(space), stem_traffic(space)
    one = np.array([[1, 0]])
    assert tree_cost(table, stem, one) == table(one)[0]
    two = np.array([[1, 0], [1, 1]])
    assert tree_cost(table, stem, two) == table(two).sum() - stem - table.entries[0, 1]
    assert copy_bandwidth(CPU) > 1e8


# Data


def feed_of(**changes):
    usual = {"source": "photos", "images": 10**6, "image_size": 224, "workers": 8, "cores": 16, "first": 3000.0}
    usual |= {"again": 3100.0, "file_bytes": 1e11, "kept_bytes": 2 * 10**11, "memory": 10**12, "stays": False}
    return Feed(**{**usual, **changes})


def test_the_verdict_about_data():
    need = Need(9300, "given")
    text = verdict(feed_of(), need)
    assert text.startswith(
        "The loader delivers 3,100 images/s, training takes 9,300: training would wait for data 66.7% of the time;"
    )
    assert "about 24 cores, and there are 16; use all cores (data.workers=16)" in text
    assert "data.memory_gb=200" in text
    assert "use 16 workers (data.workers=16)" in verdict(feed_of(), Need(6000, "given"))
    assert verdict(feed_of(), Need(3000, "given")).endswith("training does not wait for data.")
    slow = verdict(feed_of(first=1000.0), Need(3000, "given"))
    assert "does not wait for data, except in the first epoch, which gets 1,000 images/s." in slow
    stored = verdict(feed_of(first=1000.0, memory=10**11), Need(3000, "given"))  # the files do not stay in memory
    assert "66.7% of the time; the storage is the limit (3,100 images/s once files are in memory)" in stored
    assert "cores" not in stored
    kept = verdict(feed_of(stays=True, images=3000), need)
    assert kept.startswith("All 3,000 images stay in memory")
    assert "once, in about 1 s" in kept


def test_the_rate_of_a_loader_is_measured(work, photos):
    rate, read = loader_rate(work.data.train, 4, 0.05, 0, CPU)
    assert rate > 0
    assert read <= len(work.data.train)
    feed = measure_feed(str(photos), 8, 0, 0.05, CPU)
    assert feed.images == 42
    assert feed.stays
    assert 0 < feed.first <= feed.again
    assert feed.file_bytes == pytest.approx(
        sum(file.stat().st_size for file in photos.rglob("*.png")) * 42 / 60, rel=0.3
    )
    assert repeated_rate(work.data.train, 4, 0.05, 0, CPU) > 0


def test_dropping_files_from_memory_does_not_change_them(data, photos):
    before = {file: file.read_bytes() for file in photos.rglob("*.png")}
    forget(data._pool.source, np.arange(len(data._pool.source)))
    assert {file: file.read_bytes() for file in photos.rglob("*.png")} == before


def test_bench_data_on_the_command_line(run_cli, photos, tmp_path):
    options = (
        "bench",
        "data",
        "--data",
        photos,
        "--image-size",
        8,
        "--workers",
        1,
        "--seconds",
        0.05,
        "--device",
        "cpu",
    )
    code, out, err = run_cli(*options, "--need", 100, "--json", "--out", tmp_path / "data.json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts == json.loads((tmp_path / "data.json").read_text())
    assert (facts["needed_images_per_second"], facts["workers"], facts["waiting"]) == (100, 1, 0)
    code, out, _ = run_cli(*options, "--need", 100)
    assert code == 0
    assert "stay in memory" in out


# The cost of ImageNet


def record_of(**rates):
    rows = []
    for variant, (training, filtering) in rates.items():
        rows += [{"measure": "train", "variant": variant, "images_per_second": training}]
        rows += [{"measure": "filter", "variant": variant, "images_per_second": filtering}]
    rows.append({"measure": "train", "variant": "compiled", "images_per_second": 1.0})
    space = {"image_size": 224, "rows": rows}
    return {"machine": {"name": "a GPU"}, "spaces": {"mobilenet": space}}


def test_the_paper_s_supernet_in_hours():
    paper, preset, longest = imagenet_supernets("mobilenet")
    assert round(paper.corrected / 1e6, 1) == 89.7
    assert round(preset.corrected / 1e6, 1) == 83.8
    assert longest.optimization > preset.optimization
    record = record_of(greedynas=(10_000, 40_000), fp32=(2_000, 8_000))
    assert rates_in(record, "mobilenet").keys() == {"fp32", "greedynas"}  # a single compiled path cannot be filtered
    rows = {(row["supernet"], row["variant"]): row for row in cost_facts(record)["spaces"]["mobilenet"]}
    ours = rows[preset.name, "greedynas"]
    assert ours["hours"] == pytest.approx((preset.optimization / 10_000 + preset.evaluation / 40_000) / 3600)
    assert ours["measured_ratio"] == 4
    assert rows[preset.name, "fp32"]["hours"] == pytest.approx(5 * ours["hours"])
    # Each image of a filtering is read once, whatever the number of paths.
    delivery = (preset.optimization + preset.evaluation / 10) / (3600 * ours["hours"])
    assert ours["average_images_per_second"] == pytest.approx(delivery)
    assert ours["training_images_per_second"] == 10_000
    rates = Rates("", 10_000, 33_300)
    assert paper.seconds(rates) == pytest.approx(paper.corrected / 10_000)  # r = 3.33 is the paper's


def test_bench_cost_on_the_command_line(run_cli, tmp_path):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(record_of(greedynas=(10_000, 40_000))))
    code, out, err = run_cli("bench", "cost", "--record", file)
    assert (code, err) == (0, "")
    assert "ImageNet, mobilenet, on a GPU" in out
    assert "must deliver 10,000 images/s" in out
    assert "loader of this record" not in out  # the record has no loader
    code, out, _ = run_cli("bench", "cost", "--record", file, "--json")
    assert code == 0
    assert json.loads(out)["machine"] == "a GPU"


@pytest.mark.parametrize(("delivered", "shown"), [(2_000, True), (20_000, False)])
def test_a_loader_that_is_too_slow_is_named_with_its_hours(run_cli, tmp_path, delivered, shown):
    record = record_of(greedynas=(10_000, 40_000))
    rates = {"from memory, on the GPU": 300_000, "from JPEG files, 8 workers": delivered, "from photos/": None}
    record["spaces"]["mobilenet"]["data"] = [
        {"label": label, "images_per_second": rate, "error": None if rate else "no"} for label, rate in rates.items()
    ]
    (tmp_path / "bench.json").write_text(json.dumps(record))
    code, out, _ = run_cli("bench", "cost", "--record", tmp_path / "bench.json")
    assert code == 0
    _, preset, _ = imagenet_supernets("mobilenet")
    hours = preset.optimization / 2_000 / 3600
    sentence = f"The loader of this record (from JPEG files, 8 workers) delivered 2,000: {hours:.1f} h for the training images alone."
    assert (sentence in " ".join(out.split())) == shown
    assert ("loader of this record" in " ".join(out.split())) == shown


def test_the_documentation_quotes_the_record(run_cli):
    """The worked example in docs/results/speed.md is the output of its command on the stored record."""
    page = (ROOT / "docs" / "results" / "speed.md").read_text(encoding="utf-8")
    file = ROOT / re.search(r"\$ greedynas bench cost --record (benchmarks/\S+)", page)[1]
    record = read_record(file)
    assert json.loads(RECORDED.read_text()) == training_rates(record)
    code, out, _ = run_cli("bench", "cost", "--record", file)
    assert code == 0
    printed = "\n".join(line.rstrip() for line in out.strip().splitlines())
    assert printed in page
    need = recorded_need(224)
    assert need.rate == training_rates(record)["training_images_per_second"]["mobilenet"]
    assert record["machine"]["name"] in need.known_from


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "unknown space 'nope'"),
        (["macro", "--variants", "fp32,fp8"], "unknown variant 'fp8'"),
        (["macro", "--measures", "speed"], "unknown measure 'speed'"),
        (["macro", "--batch", "0"], "--batch"),
        (["macro", "--batch", "1"], "--batch"),
        (["macro", "--seconds", "0"], "--seconds"),
        (["macro", "--data", "/no/such/folder"], "no such data"),
        (["mobilenet", "--image-size", "16"], "too small"),
        (["macro", "--device", "gpu"], "device"),
        (["data"], "name the images with --data"),
        (["data", "--data", "/no/such/folder"], "no such data"),
        (["data", "macro", "--data", "."], "takes no spaces"),
        (["cost"], "--record"),
        (["cost", "--record", "/no/such/file"], "no such record"),
    ],
)
def test_invalid_input_gives_an_error_of_one_line(run_cli, arguments, message):
    code, out, err = run_cli("bench", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_files_that_are_not_records_are_refused(run_cli, tmp_path):
    for text, message in (("{}", "no record of greedynas bench"), ("[", "cannot be read")):
        file = tmp_path / "x.json"
        file.write_text(text)
        code, _, err = run_cli("bench", "cost", "--record", file)
        assert code == 2
        assert message in err


def test_rounds_are_measured_in_processes_of_their_own(space_file):
    settings = replace(QUICK, apart=None, rounds=2, variants=("fp32", "greedynas"), measures=("train",))
    record = run_bench([str(space_file)], settings, Console(quiet=True))
    rows = record["spaces"]["tiny"]["rows"]
    assert [row["variant"] for row in rows] == ["fp32", "greedynas"]
    for row in rows:
        assert len(row["rounds_ms"]) == 2
        assert min(row["rounds_ms"]) > 0
    assert " to " in shown(record)


def test_a_round_more_is_a_mean_over_rounds():
    found = Measurement(4, {0: 1.0, 1: 2.0}, {})
    found.add_round(Measurement(4, {0: 2.0}, {}))
    found.add_round(Measurement(4, {0: 6.0, 1: 5.0}, {}))
    assert found.seconds[0] == pytest.approx(3.0)
    assert found.rounds == [1.5, 2.0, 5.5]
