"""check_packages(): refuse to start where a package of Quire's is, or may be in parts, another distribution's.

The wheel's packages have common names: server, engine, models, kernels. Another distribution with one of them, such as
Hugging Face's `kernels`, writes its files among Quire's if both are installed in one environment, whichever came last.
A folder before Quire's on the path hides them. Imports engine.interface.
"""

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from engine.interface.child_process import PROJECT_ROOT
from engine.interface.errors import StartupError

PACKAGES = ("engine", "kernels", "models", "server")


def check_packages() -> None:
    """Raise StartupError that names the other distribution or folder, and the way out."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin != PROJECT_ROOT / name / "__init__.py":
            owners = [d for d in importlib.metadata.packages_distributions().get(name, []) if d != "quire"]
            culprit = f"distribution {owners[0]!r}" if owners else f"{origin}"
            raise _taken(name, culprit, owners[0] if owners else name)
    for name, owner in _writers(PROJECT_ROOT):
        raise _taken(name, f"distribution {owner!r} as well, whose files are among Quire's", owner)


def _taken(name: str, culprit: str, owner: str) -> StartupError:
    is_mixed = "as well" in culprit
    return StartupError(
        f"The package `{name}` is taken by {culprit}{'' if is_mixed else ', not by Quire'}: uninstall it "
        f"(pip uninstall {owner}){', install Quire again,' if is_mixed else ''} or use a fresh environment."
    )


def _writers(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each package of ours of which another distribution has files in this folder, and the distribution."""
    for found in importlib.metadata.distributions(path=[str(folder)]):
        name = found.metadata["Name"]
        if name == "quire":
            continue
        record = "\n" + (found.read_text("RECORD") or "")
        yield from ((package, name) for package in PACKAGES if f"\n{package}/" in record)
