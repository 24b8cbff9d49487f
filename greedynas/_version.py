"""The version of the package, for itself and for the build."""

__version__ = "0.2.0"
