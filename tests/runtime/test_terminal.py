import ast
import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

import greedynas
from greedynas.rundir.progress import Progress
from greedynas.runtime.terminal import make_console
from greedynas.runtime.text import clean, logger
from tests.helpers.training import SETTINGS, tiny_space

HOSTILE = "\x1b[2J\x1b]0;title\x07[/x][bold]\r\nerror: forged\u202e\x9b31m\u2028\x7f:smile:"
SHOWN = r"\x1b[2J\x1b]0;title\x07[/x][bold]\r\nerror: forged\u202e\x9b31m\u2028\x7f:smile:"
PACKAGE = Path(greedynas.__file__).parent


# Cleaning of output


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("holiday (1).jpg", "holiday (1).jpg"),
        ("日本語 Größe नमस्ते π – “x” 👩‍💻", "日本語 Größe नमस्ते π – “x” 👩‍💻"),
        ("ideographic\u3000space, no\u00a0break", "ideographic\u3000space, no\u00a0break"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\x9b31m\x85\x00\x7f", r"\x9b31m\x85\x00\x7f"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("a\u2028b\u2029", r"a\u2028b\u2029"),
        ("\u202egnp.exe\u2066\u200f\ufeff", r"\u202egnp.exe\u2066\u200f\ufeff"),
        (os.fsdecode(b"caf\xe9.png"), r"caf\xe9.png"),
        ("\ud800", r"\ud800"),
        (HOSTILE, SHOWN),
    ],
)
def test_clean(text, shown):
    assert clean(text) == shown
    assert clean(shown) == shown
    clean(text).encode()  # can be written as UTF-8


def test_clean_keeps_line_breaks_on_request():
    assert clean("a\nb\x1b\n", lines=True) == "a\nb\\x1b\n"


def printed(*objects, **options):
    console = make_console(file=io.StringIO(), width=200, **options)
    console.print(*objects)
    return console.file.getvalue()


def table(cell):
    made = Table(title=cell, caption=cell)
    made.add_column(cell, cell)
    made.add_row(cell)
    return made


@pytest.mark.parametrize("wrap", [str, Text, Group, table, lambda cell: table(Text(cell, "bold"))])
def test_all_output_of_a_console_is_clean(wrap):
    output = printed(wrap(HOSTILE))
    for part in (r"\x1b[2J", "[/x][bold]", r"\nerror: forged\u202e", r"\x9b31m\u2028\x7f:smile:"):
        assert part in output.replace("\n", "").replace(" ", "").replace("error:", "error: ")  # the cell was wrapped
    assert all(line.isprintable() for line in output.split("\n"))


def test_styles_stay_where_they_were():
    text = Text.assemble(("a\x1bb", "bold"), "c\n", ("d", "red"))
    output = printed(text, force_terminal=True, color_system="standard")
    assert output == "\x1b[1ma\\x1bb\x1b[0mc\\n\x1b[31md\x1b[0m\n"


def test_spinners_and_progress_take_no_markup():
    console = make_console(file=io.StringIO(), force_terminal=True, width=200)
    with console.status(HOSTILE):
        pass
    with Progress(console, HOSTILE, 3) as progress:
        progress.update(1, [HOSTILE])
    output = console.file.getvalue()
    assert r"\x1b]0;title[" in output
    assert output.count(r"\x1b]0;title\x07[") >= 1
    assert "\x1b[2J" not in output
    assert "\x1b]0" not in output


def test_all_log_records_are_clean(tmp_path):
    handler = logging.FileHandler(tmp_path / "log.txt", encoding="utf-8")
    logger.addHandler(handler)
    try:
        logger.warning("cannot read %s: %s", HOSTILE, ValueError(os.fsdecode(b"\xff\n")))
        logging.getLogger("greedynas").warning(HOSTILE)
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert (tmp_path / "log.txt").read_text() == f"cannot read {SHOWN}: \\xff\\n\n{SHOWN}\n"


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def test_nothing_is_printed_by_other_means():
    """Find prints that are not cleaned."""
    others = {
        "print",
        "typer.echo",
        "typer.secho",
        "click.echo",
        "Console",
        "rich.print",
        "TextColumn",
        "Text.from_markup",
    }
    others |= {f"sys.{stream}.{how}" for stream in ("stdout", "stderr") for how in ("write", "writelines")}
    found = [
        f"{file.relative_to(PACKAGE)}:{line} {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.name != "terminal.py" and file.parent.name != "kit"  # a script that runs without greedynas
        for name, line in calls(ast.parse(file.read_text()))
        if name in others
    ]
    assert found == []
    markup = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "markup" and ast.unparse(node.value) != "False"
    ]
    assert markup == []


# Encodings and closed streams


def call(*arguments, **options):
    command = [sys.executable, "-m", "greedynas", *map(str, arguments)]
    environment = {**os.environ, **options.pop("env", {})}
    return subprocess.run(command, stderr=subprocess.PIPE, timeout=60, check=False, env=environment, **options)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_every_encoding_works(encoding):
    done = call("describe", "--space", "macro", stdout=subprocess.PIPE, env={"PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, b"")
    assert "Space macro" in done.stdout.decode(encoding)


def test_output_that_cannot_be_written_is_an_error_or_dropped():
    done = call("describe", stdout=subprocess.PIPE, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, b"")
    read, write = os.pipe()
    os.close(read)
    done = call("describe", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:  # noqa: PTH123
            done = call("describe", stdout=full)
        assert done.returncode == 2
        assert done.stderr.startswith(b"error: standard output: No space left on device")
        assert done.stderr.count(b"\n") == 1


class Nowhere(io.RawIOBase):
    """A pipe without a reader."""

    def writable(self):
        return True

    def write(self, data):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("stream", ["ascii", "closed"])
def test_training_continues_whatever_happens_to_its_output(run_cli, photos, tmp_path, monkeypatch, stream, one_thread):
    """Check streams that cannot encode the π in the reason for stopping, or that are closed."""
    import yaml

    settings = {
        "space": tiny_space(repeat=1).model_dump(mode="json"),
        "data": {"source": str(photos), "test_images": 6, "val_images": 12, "workers": 0},
        "train": {**SETTINGS, "max_epochs": 9, "stopping": True, "alpha": 1.0},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    raw = io.BytesIO() if stream == "ascii" else Nowhere()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw), "ascii"))
    code, _, output = run_cli("train", tmp_path / "tiny.yaml", "--out", tmp_path / "run")
    assert (code, output) == (0, "")
    assert any((tmp_path / "run" / "supernet").glob("step-*.safetensors"))
    if stream == "ascii":
        assert b"the pool is steady (? = " in raw.getvalue()
