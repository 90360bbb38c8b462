"""Quire as a Python library: `from quire import LLM`. The command `quire` starts here, too.

    llm = LLM("./my-model")                                    # or a hub id, or nothing: the built-in demo
    llm.generate(["Once upon a time"], max_tokens=32)          # a list of answers
    llm.chat("What is a quire?", temperature=0).text           # or messages as in OpenAI's API
    for piece in llm.chat("Count to ten.", stream=True): ...   # piece by piece

Quire's packages have the names of common folders (server, engine, models, kernels). Before any of them is imported,
this module checks that they are Quire's, and not those of a script's folder or of another distribution.
"""

import importlib.util
import sys
from pathlib import Path

_PACKAGES = ("engine", "kernels", "models", "server")
_ROOT = Path(__file__).resolve().parent


def _shadowed() -> str | None:
    """Return why a package of Quire's would be another one, as a sentence; None if all are Quire's."""
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
        if origin is not None and Path(origin).resolve() == _ROOT / name / "__init__.py":
            continue
        place = origin or (str(next(iter(spec.submodule_search_locations or ()), "")) if spec is not None else "")
        return (
            f"The package `{name}` that Python finds is {place or 'none'}, not Quire's {_ROOT / name}: "
            "rename that one, start from another folder, or install Quire in an environment of its own."
        )
    return None


def main() -> int:
    """Run the command `quire` and return its exit code."""
    reason = _shadowed()
    if reason is not None:
        print(f"quire: error: {reason}", file=sys.stderr)
        return 3
    from server.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())

if (_reason := _shadowed()) is None:
    from server.local.llm import LLM, Answer
elif Path(sys.argv[0]).name != "quire":  # the command says it in one line
    raise ImportError(_reason)

__all__ = ["LLM", "Answer", "main"]
