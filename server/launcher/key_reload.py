"""KeyReloader: reads the key file again on SIGHUP and sends the keys to every HTTP worker.

Signals are handled one after another. If the file is wrong, the keys stay as they are and the log has the reason.
Imports engine.interface.config and server.config.api_keys.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from engine.interface.config import LaunchConfig
from engine.interface.errors import StartupError
from server.config.api_keys import read_file_hashes

logger = logging.getLogger(__name__)


class KeyReloader:
    """Holds the hashes of the current keys. set_keys: sends them to the workers."""

    def __init__(self, config: LaunchConfig, hashes: Sequence[str], set_keys: Callable[[list[str]], None]) -> None:
        self._config = config
        self._hashes = list(hashes)
        self._set_keys = set_keys
        self._lock = asyncio.Lock()

    async def reload(self) -> None:
        """Read the file, in a thread: it may lie on a disk that hangs. Keys of flags and the environment stay."""
        file = self._config.api_key_file
        if file is None:
            logger.warning("SIGHUP has no effect without --api-key-file")
            return
        async with self._lock:
            try:
                from_file = await asyncio.to_thread(read_file_hashes, file)
            except StartupError as error:
                logger.error("api keys not reloaded, the old ones stay valid: %s", error.message)
                return
            old, new = self._hashes, list(dict.fromkeys([*self._config.given_key_hashes, *from_file]))
            added, removed = len(set(new) - set(old)), len(set(old) - set(new))
            self._hashes = new
            self._set_keys(new)
            logger.info("api keys reloaded file=%s keys=%d added=%d removed=%d", file, len(new), added, removed)
