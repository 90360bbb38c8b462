"""StreamedReply: parses a streamed HTTP/1.1 reply from bytes to the payloads of its server-sent events. Does no I/O.

An HTTP library costs 5 to 30 µs an event, which would make the client the limit at tens of thousands of tokens a
second. This parser reads only what servers stream: chunked, counted, or until the connection closes.
Life of a StreamedReply: feed() per read, until `is_complete`.
"""

_MAX_HEAD_BYTES = 65_536
_MAX_ERROR_BYTES = 65_536


class ReplyError(Exception):
    """The bytes are not an HTTP/1.1 reply."""


class StreamedReply:
    """One reply on a connection."""

    def __init__(self) -> None:
        self.status = 0  # 0: not known yet
        self.is_complete = False
        self.keeps_alive = False  # the connection serves another request after this reply
        self.error_body = b""  # of a reply other than 200; at least its beginning
        self._raw = b""
        self._line = b""
        self._is_chunked = False
        self._num_left: int | None = None  # bytes of the body; None: until the connection closes

    def feed(self, data: bytes) -> list[bytes]:
        """Parse received bytes; return the payloads of the `data:` lines they complete. Raises ReplyError."""
        self._raw += data
        if self.status == 0 and not self._read_head():
            return []
        body = self._read_chunks() if self._is_chunked else self._read_plain()
        if self.status != 200:
            self.error_body = (self.error_body + body)[:_MAX_ERROR_BYTES]
            return []
        *lines, self._line = (self._line + body).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def feed_end(self) -> None:
        """Handle the end of the connection, which completes only a body without a length."""
        self.is_complete = self.is_complete or (self.status > 0 and not self._is_chunked and self._num_left is None)

    def _read_head(self) -> bool:
        head, separator, rest = self._raw.partition(b"\r\n\r\n")
        if not separator:
            if len(self._raw) > _MAX_HEAD_BYTES:
                raise ReplyError("its header does not end")
            return False
        first_line, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first_line.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise ReplyError(f"it begins with {first_line[:80]!r}")
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (s.partition(":") for s in lines)}
        self.status, self._raw = int(status[:3]), rest
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "")
        length = headers.get("content-length", "")
        self._num_left = int(length) if length.isdigit() else None
        has_end = self._is_chunked or self._num_left is not None
        self.keeps_alive = has_end and version == "HTTP/1.1" and headers.get("connection") != "close"
        return True

    def _read_plain(self) -> bytes:
        body, self._raw = self._raw, b""
        if self._num_left is not None:
            self._num_left -= len(body)
            self.is_complete = self._num_left <= 0
        return body

    def _read_chunks(self) -> bytes:
        """Return the content of the chunks received completely (RFC 9112, §7.1)."""
        raw, position, content = self._raw, 0, []
        while not self.is_complete and (end := raw.find(b"\r\n", position)) >= 0:
            try:
                size = int(raw[position:end].partition(b";")[0], 16)
            except ValueError:
                raise ReplyError(f"a chunk has the size {raw[position:end][:40]!r}") from None
            start = end + 2
            if size == 0:  # then trailers, if any, and an empty line
                self.is_complete = raw.startswith(b"\r\n", start) or raw.find(b"\r\n\r\n", start) >= 0
                break
            if len(raw) < start + size + 2:
                break
            content.append(raw[start : start + size])
            position = start + size + 2
        self._raw = raw[position:]
        return b"".join(content)
