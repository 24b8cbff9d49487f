"""Write the pages of docs/reference: the Python API, the command line and the settings, from the code itself.

python tools/reference_pages.py          # after a change of public names, options or settings; a test compares the
pages
"""

import inspect
import re
from pathlib import Path

import typer.main

import greedynas
from greedynas.cli import main as cli

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
GROUPS = {
    "The whole job": ["run", "train", "search_run", "retrain", "export", "report", "predict", "Prediction"],
    "Runs": ["open_run", "runs", "RunRecord", "load_supernet", "load_network", "Card"],
    "Settings": ["load_config", "Config", "TrainSettings", "SearchSettings", "RetrainSettings", "DataSettings"],
    "Data": ["open_data", "Data"],
    "Spaces and paths": [
        *(
            "load_space",
            "space_names",
            "Space",
            "Stage",
            "Fixed",
            "Budget",
            "parse_path",
            "op_names",
            "compact",
            "canonical",
        ),
        *("known_networks", "KnownNetwork", "describe", "draw_path", "parse_count", "parse_latency"),
    ],
    "Supernets and networks": ["Supernet", "Mixture", "build_network", "Network", "register_timm_models"],
    "The paper's algorithms": [
        *("filter_paths", "Filtered", "CandidatePool", "train_supernet", "TrainState", "evaluate_paths", "Evaluation"),
        *("search", "Searched", "Found"),
    ],
    "Latency": ["measure_latency", "import_latency", "load_latency_table", "LatencyTable"],
}


def api_page() -> str:
    """Return the page of all public names in groups; names without a group are extension points."""
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, "Extension points": [name for name in greedynas.__all__ if name not in grouped]}
    lines = [
        "# Python API",
        "",
        "Everything on this page is public: `import greedynas` and use it as `greedynas.NAME`.",
        "",
    ]
    for title, names in groups.items():
        lines += [f"## {title}", ""]
        for name in names:
            if name in greedynas.__all__:
                lines += [f"::: greedynas.{name}", ""]
    return "\n".join(lines).rstrip() + "\n"


def command_page() -> str:
    """Return the page of all commands with their options."""
    lines = ["# Command line", "", "`greedynas VERB --help` prints the same on a terminal.", ""]
    root = typer.main.get_command(cli.app)
    for words, command in _commands(root):
        lines += [f"## greedynas {' '.join(words)}", "", _prose(command.help or ""), ""]
        examples = re.findall(r"^Example: (.*)$", command.epilog or "", re.M)
        lines += [
            "```console",
            *(f"$ {example}" for example in examples),
            "```",
            "",
            "| option | what it does |",
            "|---|---|",
        ]
        for param in command.params:
            if param.name == "help":
                continue
            names = ", ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts] if name.startswith("-"))
            shown = names or f"`{(param.metavar or param.name or '').upper()}`"
            lines.append(f"| {shown} | {_cell(getattr(param, 'help', None) or '')} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def settings_page() -> str:
    """Return the page of all settings with their defaults and comments."""
    lines = [
        *("# Settings", ""),
        'A preset or a YAML file has these sections. `--set key=value` changes a setting on the command line, `changes={"key": value}` in Python; a',
        "key is written with its section, such as `train.lr`. `greedynas train PRESET --plan` prints all of them with the values of a preset.",
        "",
    ]
    sections = {
        "": greedynas.Config,
        "data": greedynas.DataSettings,
        "train": greedynas.TrainSettings,
        "search": greedynas.SearchSettings,
        "retrain": greedynas.RetrainSettings,
    }
    for section, model in sections.items():
        lines += [f"## {section or 'At the top'}", "", "| setting | default | what it is |", "|---|---|---|"]
        comments = _comments(model)
        for name, field in model.model_fields.items():
            if section == "" and name in sections:
                continue
            default = "" if field.is_required() or not _plain(field.default) else f"`{_shown(field.default)}`"
            lines.append(
                f"| `{section + '.' if section else ''}{name}` | {default} | {_cell(comments.get(name, ''))} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _commands(command, words=()):
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _commands(inner, (*words, name))
    else:
        yield words, command


def _prose(text: str) -> str:
    return "\n\n".join(
        " ".join(part.split()) for part in re.split(r"\n\s*\n", inspect.cleandoc(text).replace("\b", ""))
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _plain(value) -> bool:
    return value is None or isinstance(value, (str, int, float, tuple, dict))


def _shown(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value) or '""'


def _comments(model) -> dict[str, str]:
    """Return the comment of each field of a class, from its line or else from the line before it."""
    found, name, before = {}, "", ""
    for line in inspect.getsource(model).splitlines():
        text, _, comment = line.partition("#")
        if match := re.match(r"    (\w+): ", text):
            name = match[1]
            found[name] = comment.strip() or before
        elif text.strip() and comment and name and not found[name]:
            found[name] = comment.strip()  # a field of several lines
        before = comment.strip() if not text.strip() else ""
    return found


def pages() -> dict[Path, str]:
    """Return the text of each page by its file."""
    return {
        FOLDER / "api.md": api_page(),
        FOLDER / "command-line.md": command_page(),
        FOLDER / "settings.md": settings_page(),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        file.write_text(text)
