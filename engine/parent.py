"""A child process's tie to the process that started it. Imports nothing of ours."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """On Linux, ask the kernel to kill this process when its parent dies, even in the middle of long work."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
