"""A child process's tie to the process that started it, and how its end is told. Imports nothing of ours."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """On Linux, ask the kernel to kill this process when its parent dies, even in the middle of long work."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def describe_exit(returncode: int) -> str:
    """Say in words how a child ended."""
    if returncode < 0:
        hint = " (out of memory?)" if returncode == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-returncode).name}{hint}"
    return f"ended with exit code {returncode}"
