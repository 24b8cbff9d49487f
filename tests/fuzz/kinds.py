"""The kinds of input, and the command that reads each of them.

`corpus/KIND/` has files. A kind with a `place` is a file of a run directory, which replaces that of a finished run. A
kind of `words` is an argument of a command; `corpus/words/KIND.json` has a list of them.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from safetensors.torch import load_file, save

from tests.helpers.search import DATA
from tests.helpers.training import SETTINGS, tiny_space

CORPUS = Path(__file__).parent / "corpus"
NAME = "macs-60K"
SEARCH = ("search", "{run}", "--flops", "60K")
RETRAIN = ("retrain", "{run}")
REPORT = ("report", "{run}")
MODEL = f"models/{NAME}/model.safetensors"


@dataclass(frozen=True)
class Kind:
    """How input of a kind reaches the program; {file}, {run}, {image} and {word} are placeholders in the command."""

    command: tuple[str, ...]
    places: tuple[str, ...] = ()  # in a run directory
    gone: tuple[str, ...] = ()  # files of the run that are removed


FILES = {
    "space": Kind(("describe", "--space", "{file}")),
    "config": Kind(("train", "{file}", "--plan")),
    "table": Kind(("describe", "--space", "macro", "--latency-table", "{file}")),
    "timings": Kind(("latency", "import", "{file}", "--space", "macro", "--out", "{run}/table.json")),
    "model": Kind(("predict", "{file}", "{image}")),
    "onnx": Kind(("predict", "{file}", "{image}")),
    "image": Kind(("predict", f"{{run}}/{MODEL}", "{file}")),
    "weights": Kind(("retrain", "{run}", "--arch", "timm:resnet10t", "--pretrained", "{file}")),
    # Of a run
    "run-config": Kind(REPORT, ("config.yaml",)),
    "metrics": Kind(REPORT, ("metrics.jsonl",)),
    "pool": Kind(REPORT, ("supernet/pool.json",)),
    "tested": Kind(REPORT, (f"models/{NAME}/test.json",)),
    "export": Kind(REPORT, (f"models/{NAME}/export.json",)),
    "exported": Kind(("export", "{run}", "--format", "safetensors"), (f"models/{NAME}/export.json",)),
    "searched": Kind(REPORT, (f"searches/{NAME}/search.json",)),
    "arch": Kind(RETRAIN, ("arch.json", f"models/{NAME}/arch.json"), (f"searches/{NAME}/search.json",)),
    "resumed": Kind(SEARCH, (f"searches/{NAME}/search.json",)),
    "test": Kind(RETRAIN, (f"models/{NAME}/test.json",)),
    "retrain": Kind(RETRAIN, (f"models/{NAME}/retrain.json",)),
    "top": Kind((*RETRAIN, "--top", "2", "--name", "top"), ("models/top/top.json",)),
    "data": Kind(("search", "{run}", "--flops", "50K"), ("data.json",), ("data.jsonl",)),  # of an older version
    "manifest": Kind(("search", "{run}", "--flops", "50K"), ("data.jsonl",)),
    "state": Kind(("search", "{run}", "--flops", "50K"), ("supernet",)),
    "continued": Kind(("train", "{run}/tiny.yaml", "--out", "{run}"), ("supernet",)),
    "retrain-state": Kind((*RETRAIN, "--name", "again"), ("models/again/checkpoints",)),
}
WORDS = {
    "path": Kind(("describe", "--space", "macro", "--path", "{word}")),
    "known": Kind(("describe", "--path", "{word}")),
    "flops": Kind(("search", "{run}", "--flops", "{word}")),
    "latency": Kind(("search", "{run}", "--latency", "{word}")),
    "set": Kind(("train", "fashion", "--plan", "--set", "{word}")),
    "trained": Kind(("train", "{run}/tiny.yaml", "--out", "{run}/new", "--set", "{word}")),
    "params": Kind(("search", "{run}", "--params", "{word}")),
    "arch": Kind(("retrain", "{run}", "--arch", "{word}")),
    "model": Kind(("export", "{run}", "--model", "{word}")),
    "name": Kind(("search", "{run}", "--flops", "50K", "--name", "{word}")),
    "source": Kind(("train", "fashion", "--out", "{run}/new", "--data", "{word}")),
    "hours": Kind(("run", "fashion", "--out", "{run}/new", "--hours", "{word}")),
}


def lay(kind: Kind, content: bytes, file: Path | None, run: Path, image: Path, word: str = "") -> list[str]:
    """Put the input in its place; return the command that reads it."""
    for place in kind.places:
        there = run / place
        if there.suffix:
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(content)
        else:
            _lay_checkpoint(there, content, run)
    for place in kind.gone:
        (run / place).unlink(missing_ok=True)
    values = {"{file}": str(file), "{word}": word, "{image}": str(image)}
    return [values.get(part, part.replace("{run}", str(run))) for part in kind.command]


def _lay_checkpoint(folder: Path, state: bytes, run: Path) -> None:
    """Write an intact checkpoint with this state and the right digest."""
    whole = next(iter(sorted((run / "supernet").glob("step-*.safetensors"), reverse=True)))
    tensors = load_file(whole)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data = save(tensors, {"state": state.decode(errors="replace")})
    digest = hashlib.sha256(data).hexdigest()[:16]
    (folder / f"step-000000999-{digest}.safetensors").write_bytes(data)


def cases() -> Iterator[tuple[str, Kind, Path | None, str]]:
    """Yield (name, kind, file, word) for the whole corpus. Inputs named `found` once failed and may be accepted now."""
    for name, kind in FILES.items():
        for file in sorted((CORPUS / name).glob("*")):
            yield f"{name}/{file.name}", kind, file, ""
    for name, kind in WORDS.items():
        for found, file in (
            ("", CORPUS / "words" / f"{name}.json"),
            ("found-", CORPUS / "words" / "found" / f"{name}.json"),
        ):
            for number, word in enumerate(json.loads(file.read_text(encoding="utf-8")) if file.exists() else ()):
                yield f"words/{name}/{found}{number}", kind, None, word


def make_run(folder: Path, photos: Path, run_cli: object) -> Path:
    """Make a small run that is trained, searched and retrained; return its folder."""
    config = folder / "tiny.yaml"
    settings = {
        "space": tiny_space(repeat=1).model_dump(mode="json"),
        "data": {**DATA, "source": str(photos)},
        "train": {**SETTINGS, "max_epochs": 2},
        "search": {"population": 4, "generations": 2},
        "retrain": {"epochs": 1, "batch_size": 16},
    }
    config.write_text(yaml.safe_dump(settings))
    run = folder / "run"
    for command in (["train", config, "--out", run], ["search", run, "--flops", "60K"], ["retrain", run]):
        code, _, told = run_cli(*command)  # type: ignore[operator]
        assert code == 0, told
    shutil.copy(config, run)
    return run
