"""The version of the running package. Standard library only."""

import functools
import importlib.metadata


@functools.cache
def package_version() -> str:
    """Return the installed version, or "unknown" when run from a source tree that is not installed."""
    try:
        return importlib.metadata.version("quire")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
