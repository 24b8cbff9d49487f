import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from greedynas import __version__, cli, load_space
from tests.test_paths import FIGURES

ROOT = Path(__file__).parents[1]


@pytest.fixture
def greedynas(monkeypatch, capsys):
    """Call the command line in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["greedynas", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("name", list(FIGURES))
def test_describe_known_networks_as_json(greedynas, name):
    code, out, _ = greedynas("describe", "--path", name, "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["params"], facts["macs"]) == FIGURES[name]
    assert facts["name"] == name
    assert facts["space"] == ("mobilenet" if name == "proxyless-r" else "mobilenet-se")
    assert [load_space(facts["space"]).ops[op] for op in facts["path"]] == facts["ops"]
    for cost in ("macs", "params"):
        assert sum(layer[cost] for layer in facts["layers"]) == facts[cost]


def test_describe_a_path_at_another_size_and_class_count(greedynas):
    _, out, _ = greedynas("describe", "--space", "macro", "--path", "22212202", "--json")
    assert json.loads(out)["params"] == 1_985_514
    assert json.loads(out)["macs"] == 85_164_544
    _, out, _ = greedynas(
        "describe", "--space", "macro", "--path", "22212202", "--classes", 100, "--image-size", 64, "--json"
    )
    facts = json.loads(out)
    assert facts["params"] == 1_985_514 + 90 * 1281
    assert facts["macs"] == 4 * (85_164_544 - 12_800) + 128_000
    assert facts["canonical_path"] == [2, 2, 2, 1, 2, 2, 2, 0]


def test_describe_a_space(greedynas):
    _, out, _ = greedynas("describe", "--space", "mobilenet", "--json")
    facts = json.loads(out)
    assert facts["paths"] == 7**21
    assert facts["supernet_params"] == 16_252_744
    assert facts["macs"]["min"] == 50_878_976
    assert facts["macs"]["min"] < facts["macs"]["quantiles"]["50%"] < facts["macs"]["max"]
    assert sum(facts["macs"]["histogram"]["counts"]) == facts["sampled_paths"]
    code, out, _ = greedynas("describe", "--space", "mobilenet")
    assert code == 0
    assert "558,545,864,083,284,007 paths" in out
    assert "MB6_K7" in out


def test_describe_without_arguments_lists_what_there_is(greedynas):
    _, out, _ = greedynas("describe")
    assert all(name in out for name in ("mobilenet-se", "shufflenet", *FIGURES))


def test_a_space_file_works_where_a_name_does(greedynas, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(load_space("macro").to_yaml().replace("name: macro", "name: '<b>mine</b> [red]'"))
    _, out, _ = greedynas("describe", "--space", file, "--path", "22212202", "--json")
    assert json.loads(out)["macs"] == 85_164_544
    code, out, _ = greedynas("describe", "--space", file)
    assert code == 0
    assert "<b>mine</b> [red]" in out


def test_drawing(greedynas, tmp_path):
    from xml.etree import ElementTree

    file = tmp_path / "a.svg"
    code, _, _ = greedynas("describe", "--path", "greedynas-a", "--svg", file)
    assert code == 0
    texts = [element.text for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("MB3_K5_SE") == 3
    assert texts.count("ID") == 1
    fills = {box.get("fill") for box in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}rect")}
    assert len(fills) > 5  # coloured by op


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--space", "mobilenett"], "unknown space 'mobilenett' (did you mean 'mobilenet'?)"),
        (["--space", "nosuch.yaml"], "no such space file"),
        (["--space", "macro", "--path", "222"], "has 8 ops, got 3"),
        (["--space", "macro", "--path", "22222229"], "has no op 9"),
        (["--space", "macro", "--path", "ID ID ID ID ID ID ID MB3_K7"], "not in layer 7"),
        (["--space", "macro", "--path", "ID ID ID ID ID ID ID FOO"], "unknown op"),
        (["--space", "macro", "--path", "greedynas-a"], "network of mobilenet-se"),
        (["--path", "greedynas-x"], "unknown network"),
        (["--path", "2221"], "--space"),
        (["--space", "mobilenet", "--image-size", "31"], "too small"),
        (["--space", "mobilenet", "--image-size", "0"], "--image-size"),
        (["--space", "mobilenet", "--image-size", "-5"], "--image-size"),
        (["--space", "mobilenet", "--classes", "0"], "--classes"),
        (["--space", "mobilenet", "--classes", "many"], "--classes"),
        (["--space", "mobilenet", "--svg", "x.svg"], "--path"),
        (["--path", "greedynas-a", "--svg", "no/such/folder/x.svg"], "cannot write"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(greedynas, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = greedynas("describe", *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert not list(tmp_path.iterdir())


def test_a_broken_space_file_is_one_line(greedynas, tmp_path):
    (tmp_path / "broken.yaml").write_text("name: x\n  ops: [")
    code, _, err = greedynas("describe", "--space", tmp_path / "broken.yaml")
    assert code == 2
    assert err.count("\n") == 1
    assert "not valid YAML" in err


def test_help_shows_an_example_for_every_verb(greedynas):
    verbs = [command.name or command.callback.__name__ for command in cli.app.registered_commands]
    assert "describe" in verbs
    for verb in verbs:
        code, out, _ = greedynas(verb, "--help")
        assert code == 0
        assert f"greedynas {verb}" in out
        assert "Example" in out
    assert greedynas("--version") == (0, f"{__version__}\n", "")
    assert "describe" in greedynas()[1]


def test_demo_does_not_pretend(greedynas):
    code, out, _ = greedynas("demo")
    assert code == 0
    assert "Nothing was trained" in out


def test_the_wheel_works_elsewhere(tmp_path):
    run = {"check": True, "capture_output": True, "text": True}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT], **run)
    (wheel,) = tmp_path.glob("greedynas-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        f"greedynas/spaces/{name}.yaml" for name in ("fashion", "macro", "mobilenet", "mobilenet-se", "shufflenet")
    } <= set(names)
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], **run)
    code = "import greedynas, sys; print(greedynas.__file__); sys.argv = ['greedynas', 'describe', '--path', 'greedynas-a', '--json']; "
    code += "from greedynas.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, **run
    )
    where, _, facts = result.stdout.partition("\n")
    assert Path(where).is_relative_to(tmp_path / "site")
    assert json.loads(facts)["params"] == 6_503_082


def test_describe_does_not_wait_for_torch():
    code = "import sys, greedynas.cli, greedynas.describe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
