"""Optional packages: a check whether they are installed, and the command that installs them."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from greedynas.runtime.errors import GreedyNASError


def require_packages(what: str, packages: Mapping[str, str], advice: str = "") -> None:
    """Refuse something whose packages are not installed, in one line with the command that installs them.

    Args:
        what: What needs the packages, such as "the format 'onnx'".
        packages: The requirement that pip installs, by the name of the module.
        advice: What else the user should know before the installation.

    Raises:
        GreedyNASError: A package is missing.
    """
    missing = missing_packages(packages)
    if missing:
        verb = "which is" if len(missing) == 1 else "which are"
        command = f"pip install {' '.join(dict.fromkeys(packages[name] for name in missing))}"
        raise GreedyNASError(
            f"{what} needs {', '.join(missing)}, {verb} not installed: {command}{advice and f' ({advice})'}"
        )


def missing_packages(packages: Iterable[str]) -> list[str]:
    """Return the names of modules that are not installed."""
    return [name for name in packages if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # the parent package is missing, or the module has no spec
        return False
