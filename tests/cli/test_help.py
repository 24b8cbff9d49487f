"""Tests of help texts, of errors that point to them, and of shell completion."""

import re
import resource
import shlex
import subprocess
import sys

import pytest
import typer.main

from greedynas import __version__
from greedynas.cli import main as cli

ROOT = typer.main.get_command(cli.app)


def walk(command=ROOT, words=()):
    """Yield every command of the command line with the words that call it."""
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*words, name))


COMMANDS = dict(walk())
VERBS = [words for words, command in COMMANDS.items() if not hasattr(command, "commands")]


def params_of(words):
    command = COMMANDS[words]
    return command.get_params(typer.Context(command))


@pytest.fixture
def help_of(run_cli, monkeypatch):
    """Return a function that returns the help of a command on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(words):
        code, out, err = run_cli(*words, "--help")
        assert (code, err) == (0, "")
        assert max(map(len, out.splitlines())) <= 80
        return out

    return show


def test_the_command_line_has_all_verbs():
    assert [" ".join(words) for words in VERBS] == [
        *("run", "demo", "train", "search", "retrain", "export", "report"),
        *("runs", "status", "compare", "rm", "watch", "doctor", "push", "pull"),
        *("predict", "describe"),
        *("latency measure", "latency kit", "latency import"),
        *(f"study {name}" for name in ("theory", "macro", "ranking", "methods", "ablation", "searchers")),
        "bench",
    ]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_shows_examples_that_are_accepted(help_of, words):
    examples = re.findall(r"^ Example: (greedynas .*?) *$", help_of(words), re.MULTILINE)
    assert examples
    # Each example is in one line, so that it can be copied.
    assert examples == re.findall(r"^Example: (.*)$", COMMANDS[words].epilog, re.MULTILINE)
    for example in examples:
        program, *arguments = shlex.split(example)
        assert program == "greedynas"
        assert tuple(arguments[: len(words)]) == words
        accept(arguments)


def accept(arguments):
    """Parse a command as the command line does, without running it."""
    command = ROOT
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    with command.make_context("greedynas", arguments) as context:
        assert not context.args


def test_an_example_with_a_wrong_option_is_noticed():
    with pytest.raises(cli.UsageError, match="--flopz"):
        accept(["search", "runs/photos", "--flopz", "330M"])
    with pytest.raises(cli.UsageError):
        accept(["search", "--flops", "330M"])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_flags_and_arguments_have_no_type(help_of, words):
    assert not re.search("bool", help_of(words), re.IGNORECASE)
    assert not re.search(r"<(str|path|list)\b|\.{4}", help_of(words), re.IGNORECASE)
    assert any(param.name == "help" for param in params_of(words))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_texts_are_sentences(words):
    texts = [COMMANDS[words].help, *(param.help for param in params_of(words))]
    for text in texts:
        for paragraph in text.split("\n\n"):
            assert re.fullmatch(r"[A-Z].*\.", paragraph), paragraph
            assert not re.search(r"\b(so many|so long|goes on|ditch|dearest)", paragraph), paragraph


def test_verbs_and_options_are_grouped(help_of):
    panels = re.findall(r"╭─ (.*?) ─", help_of(()))
    assert panels == ["Options", "Whole job", "Stages", "Runs", "Use and inspect", "Research"]
    for words in VERBS:
        options = [param for param in params_of(words) if param.param_type_name == "option"]
        assert all(option.rich_help_panel for option in options), words
    panels = re.findall(r"╭─ (.*?) ─", help_of(("run",)))
    assert panels == [
        *("Arguments", "Data", "Output", "Budget", "Comparison", "Pretrained network", "Settings", "General")
    ]


def test_each_verb_is_described_in_one_line(help_of):
    for words, command in COMMANDS.items():
        if hasattr(command, "commands"):
            out = help_of(words)
            for name, inner in command.commands.items():
                first = inner.help.partition("\n")[0]
                assert re.search(rf"^│ {name} +{re.escape(first)} +│$", out, re.MULTILINE), name


def test_a_call_without_a_verb_shows_the_help(run_cli):
    assert run_cli("--version") == (0, f"{__version__}\n", "")
    assert "describe" in run_cli()[1]
    assert "greedynas latency measure" in run_cli("latency")[1]
    assert "greedynas study macro" in run_cli("study")[1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["search"], "missing argument 'DIR'; see greedynas search --help"),
        (["study", "methods"], "missing argument 'CONFIG'; see greedynas study methods --help"),
        (["latency", "measure"], "missing option '--space'; see greedynas latency measure --help"),
        (["train", "fashion", "--set"], "option '--set' requires an argument; see greedynas train --help"),
        (["--nonsense"], "no such option: --nonsense; see greedynas --help"),
        (["latency", "x"], "no such command 'x'; see greedynas latency --help"),
    ],
)
def test_errors_point_to_the_help_of_the_verb(run_cli, arguments, line):
    assert run_cli(*arguments) == (2, "", f"error: {line}\n")


def test_an_unknown_verb_is_one_line(run_cli):
    code, out, err = run_cli("serch")
    assert (code, out) == (2, "")
    # Older versions of typer have no suggestions.
    assert re.fullmatch(r"error: no such command 'serch'( \(did you mean 'search'.*\?\))?; see greedynas --help\n", err)


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_an_unknown_option_is_one_line(run_cli, words):
    code, out, err = run_cli(*words, "--nonsense")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: no such option: --nonsense")
    assert err.endswith(f"; see greedynas {' '.join(words)} --help\n")


# Shell completion


def completed(run_cli, monkeypatch, line):
    """Return what bash would offer for the last word of a line."""
    words = line.split(" ")
    monkeypatch.setenv("_GREEDYNAS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    code, out, err = run_cli()
    assert (code, err) == (0, "")
    return out.split()


def test_completion_knows_verbs_and_options(run_cli, monkeypatch):
    assert completed(run_cli, monkeypatch, "greedynas se") == ["search"]
    assert completed(run_cli, monkeypatch, "greedynas study m") == ["macro", "methods"]
    assert completed(run_cli, monkeypatch, "greedynas search runs/photos --min") == [
        *("--min-flops", "--min-params", "--min-latency")
    ]


def test_completion_can_be_shown_and_installed(run_cli, monkeypatch, tmp_path):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # allows an explicit name of the shell
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, err = run_cli("--show-completion", "bash")
    assert (code, err) == (0, "")
    assert "_GREEDYNAS_COMPLETE=complete_bash" in out
    assert out.rstrip().endswith(" greedynas")
    code, message, err = run_cli("--install-completion", "bash")
    assert (code, err) == (0, "")
    script = tmp_path / ".bash_completions" / "greedynas.sh"
    assert script.read_text().strip() == out.strip()
    assert str(script) in "".join(message.split("\n"))
    assert str(script) in (tmp_path / ".bashrc").read_text()


def test_completion_is_not_in_the_list_of_options(help_of):
    out = help_of(())
    assert not re.search(r"│ --(install|show)-completion", out)
    assert "greedynas --install-completion" in " ".join(out.split())


# Start-up


@pytest.mark.timed
@pytest.mark.parametrize("verb", ["--help", "describe"])
def test_help_and_describe_start_at_once(verb):
    """Check the start-up by processor time, on which other processes have less effect than on wall-clock time."""

    def seconds(*command):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    libraries = "import numpy, pydantic, rich.console, rich.table, typer, yaml"
    own = min(seconds("-m", "greedynas", verb) for _ in range(5))
    # On a slow machine, or beside other work, in proportion to what the libraries alone take.
    assert own < max(0.4, 2.3 * min(seconds("-c", libraries) for _ in range(5)))
