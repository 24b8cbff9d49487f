"""Packages that only some uses of greedynas need: whether they are installed, and how to install them."""

from collections.abc import Mapping
from importlib.util import find_spec

from greedynas.runtime.errors import GreedyNASError


def require_packages(what: str, packages: Mapping[str, str]) -> None:
    """Refuse something whose packages are not installed, in one line with the command that installs them.

    Args:
        what: What needs the packages, such as "the format 'onnx'".
        packages: By the name that is imported, what pip installs.

    Raises:
        GreedyNASError: A package is missing.
    """
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        verb = "which is" if len(missing) == 1 else "which are"
        command = f"pip install {' '.join(dict.fromkeys(packages[name] for name in missing))}"
        raise GreedyNASError(f"{what} needs {', '.join(missing)}, {verb} not installed: {command}")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # of a package that its parent does not have, or a module without a spec
        return False
