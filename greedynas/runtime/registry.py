"""Registries: everything that a plugin can add to greedynas, by kind and name.

Each extension point has one registry. Built-in implementations are given as "module:attribute" and imported on first
use. Others are added by `register` in a plugin (`--plugin MODULE`), or by an entry point of an installed package in the
group `greedynas.` + the plural of the kind:

    [project.entry-points."greedynas.samplers"]
    favourites = "my_package.samplers:favourites"
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from greedynas.runtime.errors import GreedyNASError, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    """The implementations of one extension point by name.

    Args:
        kind: What one implementation is called in messages, such as "sampler".
        builtin: The implementations that ship, as "module:attribute".
    """

    def __init__(self, kind: str, builtin: Mapping[str, str]):
        self.kind = kind
        self._places: dict[str, str | EntryPoint] = dict(builtin)
        self._found: dict[str, T] = {}
        self._searched_packages = False

    def register(self, name: str, implementation: T) -> T:
        """Add an implementation under a name that is not taken, and return it."""
        taken = self._found.get(name, self._places.get(name))
        # A module that is imported again, as in a notebook, may register its definitions again.
        same = _origin(taken) is not None and _origin(taken) == _origin(implementation)
        if taken is not None and not same:
            raise GreedyNASError(f"there is already a {self.kind} named {name!r}; give this one another name")
        self._found[name] = implementation
        return implementation

    def __getitem__(self, name: str) -> T:
        """Return the implementation of this name; refuse an unknown name with a list of the known ones."""
        if name not in self._found and name not in self._places:
            self._search_packages()
        if name not in self._found:
            if name not in self._places:
                raise self.unknown(name)
            self._found[name] = self._load(name, self._places[name])
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._found or name in self._places or name in self.names()

    def names(self) -> list[str]:
        """Return all names: built-in ones first, then those of plugins and installed packages."""
        self._search_packages()
        return list(dict.fromkeys([*self._places, *self._found]))

    def unknown(self, name: str) -> GreedyNASError:
        """Return the error for a name that is not registered."""
        error = unknown(self.kind, name, self.names())
        return GreedyNASError(f"{error} (those of a plugin need --plugin MODULE)")

    def _search_packages(self) -> None:
        if not self._searched_packages:
            self._searched_packages = True
            for point in entry_points(group=f"greedynas.{self.kind.lower().replace(' ', '_')}s"):
                self._places.setdefault(point.name, point)

    def _load(self, name: str, place: str | EntryPoint) -> T:
        if isinstance(place, str):
            module, _, attribute = place.partition(":")
            return cast(T, getattr(import_module(module), attribute))
        try:
            return cast(T, place.load())
        except Exception as error:  # a package may raise anything
            raise GreedyNASError(
                f"the {self.kind} {name!r} of {place.value} cannot be loaded: {_one_line(error)}"
            ) from error


def _one_line(error: Exception) -> str:
    """Return an error of third-party code as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message':.300}"


def _origin(implementation: Any) -> tuple[str, str] | None:
    """Return module and name of a function or class, or of the `build` function of an object; None for others."""
    source = getattr(implementation, "build", implementation)
    name = getattr(source, "__qualname__", None)
    return None if name is None else (source.__module__, name)


def registering(registry: Registry[T], name: str, implementation: T | None) -> Any:
    """Register an implementation, or return a decorator that registers what it decorates."""
    if implementation is not None:
        return registry.register(name, implementation)
    decorate: Callable[[T], T] = lambda decorated: registry.register(name, decorated)  # noqa: E731
    return decorate


def load_plugin(name: str) -> None:
    """Import a plugin, a module or a Python file, so that it can register its implementations.

    Args:
        name: The name of a module, which is also searched in the current directory, or a file that ends in `.py`. A
            plugin is code: it is named on the command line or in Python, never in a run directory.

    Raises:
        GreedyNASError: If it cannot be imported.

    Example:
        >>> import greedynas
        >>> from pathlib import Path
        >>> _ = Path("my_ops.py").write_text("import greedynas, torch\\ngreedynas.register_op('PLAIN', lambda i, o, s: torch.nn.Conv2d(i, o, 3, s, 1))")
        >>> greedynas.load_plugin("my_ops.py")
        >>> "PLAIN" in greedynas.registered()["op"]
        True
    """
    file = Path(name).expanduser()
    if file.suffix == ".py" and not file.is_file():
        raise GreedyNASError(f"there is no plugin {name}")
    try:
        if file.suffix == ".py":
            spec = spec_from_file_location(file.stem, file)
            assert spec is not None
            assert spec.loader is not None
            module = module_from_spec(spec)
            sys.modules.setdefault(file.stem, module)  # pickle and dataclasses look modules up there
            spec.loader.exec_module(module)
        else:
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            import_module(name)
    except GreedyNASError as error:
        raise GreedyNASError(f"plugin {name}: {error}") from None
    except ModuleNotFoundError as error:
        raise GreedyNASError(f"the plugin {name} cannot be imported: {error}") from None
    except Exception as error:
        raise GreedyNASError(f"the plugin {name} cannot be imported: {_one_line(error)}") from error
