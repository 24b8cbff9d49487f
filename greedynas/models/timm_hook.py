"""timm learns our networks when both packages are imported, in either order, and neither imports the other for it."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_with_timm() -> None:
    """Now, if timm is here; else as soon as somebody imports it."""
    if "timm" in sys.modules:
        _register()
    elif not any(isinstance(finder, _WatchForTimm) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WatchForTimm())


def _register() -> None:
    from greedynas.models.timm_models import register

    register()


class _WatchForTimm:
    """Finds nothing itself: it lets the other finders find timm, and adds our networks when that is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "timm":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                _register()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
