"""What the first process of a container must do for itself. Imports nothing of ours."""

import os
import signal
from types import FrameType


def end_as_first_process() -> None:
    """Let SIGTERM end process 1, as it ends any other: the kernel spares it a signal for which it has no handler.

    Else a container could not be stopped while it downloads a model. The launcher puts its own handler in place.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)
