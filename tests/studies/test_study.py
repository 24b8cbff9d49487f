import json
import os
import re
import time

import numpy as np
import pytest
from rich.console import Console

from greedynas.reporting.cells import Table
from greedynas.runtime.errors import GreedyNASError
from greedynas.studies import study as studies
from greedynas.studies.study import Panel, Part, Study, json_safe, publish, run_parts

CONSOLE = Console(quiet=True)


def square(folder, settings, console):
    """Record each call in a file beside the study and return a square."""
    with (folder.parents[2] / "calls.txt").open("a") as file:
        file.write(f"{folder.name} {os.getpid()}\n")
    return {"square": settings["x"] ** 2, "row": np.arange(settings["x"])}


def refuse(folder, settings, console):
    raise GreedyNASError("the data is not there")


def sleep(folder, settings, console):
    time.sleep(60)
    return {}


def die(folder, settings, console):
    os._exit(9)


def calls(folder):
    file = folder / "calls.txt"
    return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []


def parts(*xs, work=square):
    return [Part(f"p{x}", work, {"x": x}) for x in xs]


def test_results_come_back_by_name_with_their_arrays(tmp_path):
    done = run_parts(tmp_path / "study", parts(2, 3), CONSOLE, jobs=1)
    assert {name: part.result for name, part in done.items()} == {"p2": {"square": 4}, "p3": {"square": 9}}
    assert done["p3"].arrays["row"].tolist() == [0, 1, 2]
    saved = json.loads((tmp_path / "study" / "parts" / "p2.json").read_text())
    assert saved["settings"] == {"x": 2}
    assert saved["versions"]["torch"]
    assert saved["machine"]


def test_finished_parts_are_not_computed_again_and_more_can_be_added(tmp_path):
    run_parts(tmp_path / "study", parts(2), CONSOLE, jobs=1)
    done = run_parts(tmp_path / "study", parts(2, 5), CONSOLE, jobs=1)
    assert calls(tmp_path) == ["p2", "p5"]
    assert done["p2"].result == {"square": 4}


def test_parts_run_in_parallel_processes(tmp_path):
    done = run_parts(tmp_path / "study", parts(2, 3), CONSOLE, jobs=2)
    assert [done[name].result["square"] for name in ("p2", "p3")] == [4, 9]
    workers = {line.split()[1] for line in (tmp_path / "calls.txt").read_text().splitlines()}
    assert str(os.getpid()) not in workers


def test_other_settings_are_refused_with_the_differences(tmp_path):
    run_parts(tmp_path / "study", parts(2), CONSOLE, jobs=1)
    changed = [Part("p2", square, {"x": 3, "y": 1})]
    with pytest.raises(
        GreedyNASError, match=r"part p2 with other settings: x is 2 there, 3 here; y is None there, 1 here"
    ):
        run_parts(tmp_path / "study", changed, CONSOLE, jobs=1)
    assert calls(tmp_path) == ["p2"]
    free = [Part("p2", square, {"x": 3}, frozenset({"x"}))]
    assert run_parts(tmp_path / "study", free, CONSOLE, jobs=1)["p2"].result == {"square": 4}


def test_an_interrupted_part_is_computed_again(tmp_path):
    run_parts(tmp_path / "study", parts(4), CONSOLE, jobs=1)
    (tmp_path / "study" / "parts" / "p4.json").unlink()  # its arrays are written before it
    assert run_parts(tmp_path / "study", parts(4), CONSOLE, jobs=1)["p4"].arrays["row"].tolist() == [0, 1, 2, 3]
    assert calls(tmp_path) == ["p4", "p4"]


def test_a_damaged_part_is_named(tmp_path):
    run_parts(tmp_path / "study", parts(4), CONSOLE, jobs=1)
    (tmp_path / "study" / "parts" / "p4.npz").write_bytes(b"no archive")
    with pytest.raises(GreedyNASError, match=r"p4.json cannot be read .* remove it"):
        run_parts(tmp_path / "study", parts(4), CONSOLE, jobs=1)


def test_an_error_of_one_part_ends_the_others(tmp_path):
    start = time.perf_counter()
    with pytest.raises(GreedyNASError, match="the data is not there"):
        run_parts(tmp_path / "study", [*parts(1, work=sleep), *parts(2, work=refuse)], CONSOLE, jobs=2)
    assert time.perf_counter() - start < 40


def test_a_killed_process_gives_a_one_line_error(tmp_path):
    with pytest.raises(GreedyNASError, match="was killed, perhaps because memory ran out"):
        run_parts(tmp_path / "study", parts(1, 2, work=die), CONSOLE, jobs=2)


def test_a_folder_that_is_not_a_study_is_refused(tmp_path):
    (tmp_path / "letters.txt").touch()
    with pytest.raises(GreedyNASError, match="is not empty and not a greedynas study"):
        run_parts(tmp_path, parts(1), CONSOLE, jobs=1)


def test_only_one_process_works_on_a_study(tmp_path):
    with studies._locked(tmp_path / "study"), pytest.raises(GreedyNASError, match="in use by another"):
        run_parts(tmp_path / "study", parts(1), CONSOLE, jobs=1)


def a_study(**changes):
    from greedynas.reporting.charts import BLUE, Chart, figure, line  # plotly, which the worker processes need not load

    chart = Chart(figure(line([1, 2], [3, 4], "ours", BLUE)), "Two points.", "How to read it.")
    table = Table(["method", "τ"], [["<b>greedy</b>", "0.8"]], title="Agreement", note="One seed.")
    facts = {"name": "macro", "title": "Greedy is 0.8", "lead": "Text & charts.", "settings": {"a": 1}}
    facts |= {"results": {"tau": 0.8, "none": float("nan"), "n": np.int64(3)}, "tables": [table]}
    return Study(**{**facts, "draw": lambda: [Panel("Figure 2", {"The paper": chart, "Ours": chart})], **changes})


def test_a_study_names_the_machines_and_versions_that_computed_its_parts(tmp_path):
    """Make the page from parts of another machine, such as one with a GPU."""
    run_parts(tmp_path / "study", parts(2, 3), CONSOLE, jobs=1)
    for name, torch_version in {"p2": "2.11.0", "p3": "2.12.1"}.items():
        file = tmp_path / "study" / "parts" / f"{name}.json"
        saved = json.loads(file.read_text())
        file.write_text(
            json.dumps({**saved, "machine": "a GPU", "versions": {"python": "3.12", "torch": torch_version}})
        )
    alone = run_parts(tmp_path / "study", parts(2), CONSOLE, jobs=1)
    published = publish(tmp_path / "alone", a_study(parts=list(alone.values())), CONSOLE)
    assert (published["machine"], published["versions"]) == ("a GPU", {"python": "3.12", "torch": "2.11.0"})
    two = run_parts(tmp_path / "study", parts(2, 3), CONSOLE, jobs=1)
    published = publish(tmp_path / "two", a_study(parts=list(two.values())), CONSOLE)
    assert (published["machine"], published["versions"]) == ("a GPU", {"python": "3.12", "torch": "2.11.0, 2.12.1"})
    assert "2.11.0, 2.12.1" in (tmp_path / "two" / "study.html").read_text()


def test_a_study_is_published_as_json_and_as_one_page(tmp_path):
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    published = publish(tmp_path, a_study(), console)
    saved = json.loads((tmp_path / "study.json").read_text())
    assert saved["results"] == {"tau": 0.8, "none": None, "n": 3}
    assert (saved["schema_version"], saved["study"], saved["settings"]) == (1, "macro", {"a": 1})
    assert saved["machine"]
    assert saved["versions"]["torch"]
    page = (tmp_path / "study.html").read_text()
    assert published["page"] == str(tmp_path / "study.html")
    assert "&lt;b&gt;greedy" in page
    assert "not meaningful" not in page  # the note of --quick
    assert "<b>greedy" not in page
    assert page.index("The paper") < page.index("Ours")
    assert len(re.findall(r'data-chart="(chart\d)"', page)) == 2
    assert "default-src 'none'" in page  # the page loads nothing
    text = console.export_text()
    assert "Agreement" in text
    assert "<b>greedy</b>" in text
    assert "study.html" in text


def test_without_plotly_everything_but_the_page_is_written(tmp_path, monkeypatch):
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    monkeypatch.setattr(studies, "find_spec", lambda name: None)
    publish(tmp_path, a_study(draw=lambda: pytest.fail("plotly is missing")), console)
    assert (tmp_path / "study.json").exists()
    assert not (tmp_path / "study.html").exists()
    assert "install plotly and give the same command again" in console.export_text()


def test_json_safe_converts_numpy_and_non_finite_numbers():
    value = {"a": [np.float32(1.5), float("inf")], 2: (np.int64(4), None, "x", True)}
    assert json_safe(value) == {"a": [1.5, None], "2": [4, None, "x", True]}
