"""Test every code block of README, CONTRIBUTING and docs: Python is executed, commands are parsed."""

import re
import shlex

import pytest
import typer.main

from greedynas.cli import main as cli
from tests.helpers.doc_blocks import PAGES, ROOT, blocks, commands, registries_kept

COMMAND = typer.main.get_command(cli.app)
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
WITH_COMMANDS = [page for page in PAGES if commands(page)]


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_blocks_run(page, place):
    names = {"__name__": "documented"}
    with registries_kept():
        for block in blocks(page, "python"):
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            if block.mark == "skip":
                continue
            for needed in block.what.split():
                assert (place / needed).exists(), f"{block.name} needs {needed}"
            exec(code, names)


def test_blocks_that_are_not_run_have_a_reason():
    skipped = [block for page in PAGES for block in blocks(page, "python") if block.mark == "skip"]
    assert len(skipped) <= 5  # those that need a device, a runtime or an account
    assert all(block.what.strip() for block in skipped)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_are_accepted(page):
    for line in commands(page):
        words = shlex.split(line, comments=True)
        if "greedynas" not in words:
            continue  # make, pip, git, open
        accept(words[words.index("greedynas") + 1 :], line)


def accept(words, line):
    """Parse a command like the command line, without running it."""
    command = COMMAND
    words = [word for word in words if word != "…"]
    while hasattr(command, "commands"):
        assert words, line
        assert words[0] in command.commands or words[0].startswith("--"), line
        if words[0].startswith("--"):
            return  # such as greedynas --help
        command = command.commands[words.pop(0)]
    with command.make_context("greedynas", words) as context:
        assert not context.args, line


def test_python_blocks_use_no_private_names():
    for page in WITH_PYTHON:
        for block in blocks(page, "python"):
            assert not re.search(r"greedynas[\w.]*\._", block.code), block.name
