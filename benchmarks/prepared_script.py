"""Imports what a script imports, waits for a line of its input, and only then runs it: torch takes seconds to import.

    python -m benchmarks.prepared_script IMPORTED MODULE [ARGUMENT ...]
gpu_scripts.py starts it while the GPUs still belong to others; the line says that they are free. Without one, because
the process that started it has ended, nothing runs.
"""

from __future__ import annotations

import importlib
import runpy
import sys


def main() -> int:
    """Run MODULE as `python -m` does; return 1 if the input ended without a line."""
    imported, *sys.argv = sys.argv[1:]
    importlib.import_module(imported)
    if not sys.stdin.readline():
        return 1
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
