"""Registries: built-in implementations, those of plugins and of installed packages, and errors in one line."""

import sys
from textwrap import dedent

import pytest

from greedynas import GreedyNASError
from greedynas.greedy.searchers import SEARCHERS
from greedynas.greedy.settings import SAMPLERS
from greedynas.models.batchnorm import BN_MODES
from greedynas.rundir.callbacks import CALLBACKS
from greedynas.runtime.registry import Registry, load_plugin, registering
from greedynas.settings.experiments import EXPERIMENTS


def new_registry(kind="sampler"):
    return Registry(kind, {"join": "os.path:join", "split": "os.path:split"})


def function():
    """Do nothing; this is a function to register."""


@pytest.mark.parametrize("registry", [SAMPLERS, SEARCHERS, BN_MODES, CALLBACKS, EXPERIMENTS], ids=lambda one: one.kind)
def test_every_builtin_implementation_can_be_loaded(registry):
    assert registry.names()
    for name in registry.names():
        assert name in registry
        assert callable(registry[name])


def test_implementations_are_found_by_name():
    import os.path

    registry = new_registry()
    assert registry["join"] is os.path.join
    assert registry.register("mine", function) is function
    assert registry["mine"] is function
    assert registry.names() == ["join", "split", "mine"]
    assert "mine" in registry
    assert "yours" not in registry


def test_an_unknown_name_lists_all_of_them():
    registry = new_registry("BatchNorm mode")
    registry.register("mine", function)
    message = r"^unknown BatchNorm mode 'jion' \(did you mean 'join'\?\); known: join, split, mine \(those of a plugin need --plugin MODULE\)$"
    with pytest.raises(GreedyNASError, match=message):
        registry["jion"]
    with pytest.raises(GreedyNASError, match=message):
        raise registry.unknown("jion")


def test_a_name_can_be_registered_only_once():
    registry = new_registry()
    registry.register("mine", function)
    for name in ("join", "mine"):
        with pytest.raises(GreedyNASError, match=f"there is already a sampler named '{name}'"):
            registry.register(name, lambda: None)
    assert registry["mine"] is function
    registry["split"]  # loaded from now on
    with pytest.raises(GreedyNASError, match="there is already a sampler named 'split'"):
        registry.register("split", function)


def test_a_module_that_runs_again_may_register_its_definitions_again():
    registry, found = new_registry(), []
    for _ in range(2):
        space = {"__name__": "a_notebook"}
        exec("def mine(): pass", space)
        found.append(registry.register("mine", space["mine"]))
    assert registry["mine"] is found[1] is not found[0]
    assert registry.names() == ["join", "split", "mine"]


def test_registering_works_as_a_decorator():
    registry = new_registry()

    @registering(registry, "decorated", None)
    def decorated():
        """Do nothing."""

    assert registering(registry, "given", function) is function
    assert registry["decorated"] is decorated
    assert registry["given"] is function


# Installed packages


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Create an installed package that offers samplers."""
    (tmp_path / "offering.py").write_text("def good():\n    return 7\n")
    (tmp_path / "crashing.py").write_text("raise RuntimeError('first line\\nsecond line')\n")
    points = """
        [greedynas.samplers]
        good = offering:good
        join = offering:good
        lost = offering:lost
        crashing = crashing:thing
        [greedynas.batchnorm_modes]
        mode = offering:good
    """
    info = tmp_path / "offering-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(dedent(points))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("offering", "crashing"):
        sys.modules.pop(name, None)


def test_entry_points_of_installed_packages(installed):
    import os.path

    registry = new_registry()
    assert "good" in registry
    assert "offering" not in sys.modules  # nothing is imported before it is used
    assert registry["good"]() == 7
    assert registry.names() == ["join", "split", "good", "lost", "crashing"]
    assert registry["join"] is os.path.join  # built-in implementations come first
    assert new_registry("BatchNorm mode")["mode"]() == 7
    assert "good" not in new_registry("searcher")
    with pytest.raises(GreedyNASError, match="there is already a sampler named 'lost'"):
        registry.register("lost", function)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lost", "the sampler 'lost' of offering:lost cannot be loaded: AttributeError: "),
        ("crashing", "the sampler 'crashing' of crashing:thing cannot be loaded: RuntimeError: first line second line"),
    ],
)
def test_entry_points_that_cannot_be_loaded_are_one_line(installed, name, message):
    registry = new_registry()
    assert name in registry
    with pytest.raises(GreedyNASError) as error:
        registry[name]
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


# Plugins

PLUGIN = """
from dataclasses import dataclass
from greedynas.greedy.settings import SAMPLERS

@dataclass
class Thing:
    size: "int" = 3

def {name}(draw):
    return draw.uniform(Thing().size)

SAMPLERS.register("{name}", {name})
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch, registered):
    """Return a function that writes a plugin into the current directory; its effects on this process are undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(SAMPLERS, "_found", dict(SAMPLERS._found))
    before = set(sys.modules)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("plugin_"):
            del sys.modules[name]


def test_a_module_in_the_current_directory_is_loaded(plugin):
    load_plugin(plugin("plugin_module", PLUGIN.format(name="of_a_module")))
    assert callable(SAMPLERS["of_a_module"])
    load_plugin("plugin_module")  # loading it again has no effect


def test_a_file_is_loaded(plugin, tmp_path):
    plugin("plugin_file", PLUGIN.format(name="of_a_file"))
    load_plugin(str(tmp_path / "plugin_file.py"))
    assert callable(SAMPLERS["of_a_file"])
    load_plugin("plugin_file.py")


@pytest.mark.parametrize("suffix", ["", ".py"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nowhere_to_be_found", "cannot be imported: No module named 'nowhere_to_be_found'"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("x = (", "cannot be imported: SyntaxError: "),
        ("raise ValueError('one\\n two')", "cannot be imported: ValueError: one two"),
        ("raise KeyError", "cannot be imported: KeyError: no message"),
        ("from greedynas.greedy.settings import SAMPLERS\nSAMPLERS.register('greedy', print)",
         "there is already a sampler named 'greedy'"),
    ],
)  # fmt: skip
def test_plugins_that_cannot_be_imported_are_one_line(plugin, text, message, suffix):
    name = f"{plugin('plugin_broken', text)}{suffix}"
    with pytest.raises(GreedyNASError) as error:
        load_plugin(name)
    assert message in str(error.value)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plugin_nowhere", "the plugin plugin_nowhere cannot be imported: No module named 'plugin_nowhere'"),
        ("plugin_nowhere.py", "there is no plugin plugin_nowhere.py"),
        ("", "the plugin  cannot be imported: ValueError: Empty module name"),
        ("a b", "No module named 'a b'"),
    ],
)
def test_missing_plugins_are_one_line(plugin, name, message):
    with pytest.raises(GreedyNASError) as error:
        load_plugin(name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
