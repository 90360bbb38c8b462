"""Child processes: end a child when its parent dies, and describe how a child ended. Imports nothing of Quire."""

import ctypes
import os
import signal
import sys
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parent.parent.parent

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # loaded before a fork: a child may not


def die_with_parent() -> None:
    """On Linux, ask the kernel to kill this process when its parent dies, even in the middle of long work."""
    _ask_for(signal.SIGKILL)


def die_with(launcher_pid: int) -> None:
    """In the child, before exec: ask the kernel for SIGTERM when the launcher dies; exit if it has died already."""
    if _libc is not None:
        _ask_for(signal.SIGTERM)
        if os.getppid() != launcher_pid:
            os._exit(1)


def describe_exit(returncode: int) -> str:
    """Return a phrase that describes a child's exit, from its return code."""
    if returncode < 0:
        hint = " (out of memory?)" if returncode == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-returncode).name}{hint}"
    return f"ended with exit code {returncode}"


def _ask_for(signal_number: signal.Signals) -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal_number)
