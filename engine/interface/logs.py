"""The log formats of all processes of the daemon: text and JSON. Imports the standard library only; never torch.

text: `2025-11-21 00:18:04.250 INFO  engine  message key=value`; json: one object per line. By convention a message is
a few words followed by key=value pairs. Prompts, completions and keys never appear in the log.
"""

import json
import logging
import sys
from datetime import datetime


def configure_logging(*, level: str, log_format: str, process: str) -> None:
    """Send this process's log to stderr. log_format: "json" or "text"; process: the process name in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if log_format == "json" else _TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _TextFormatter(logging.Formatter):
    """Formats a record as one text line: time, level, process, message."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def formatMessage(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")  # noqa: DTZ006 - the machine's own time
        return f"{when} {record.levelname:<7} {self._process}  {record.message}"


class _JsonFormatter(logging.Formatter):
    """Formats a record as one line with a JSON object, for log collectors."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **record.__dict__.get("fields", {}),  # separate fields of a record: extra={"fields": …}
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
