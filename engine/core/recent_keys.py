"""RecentKeys: the keys of blocks that were overwritten lately. Plain Python; never torch."""

_NUM_REMEMBERED = 1 << 15


class RecentKeys:
    """A bounded memory of keys: at least the last 32,768 that were added, at most twice as many."""

    def __init__(self) -> None:
        self._newer: set[bytes] = set()
        self._older: set[bytes] = set()

    def add(self, key: bytes) -> None:
        """Remember a key."""
        if len(self._newer) >= _NUM_REMEMBERED:
            self._newer, self._older = set(), self._newer
        self._newer.add(key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._newer or key in self._older
