"""The flags of `quire batch`. Imports argparse; server/commands/batch/run.py is imported when the command runs.

Exit codes: 0 every line is answered, 1 some lines failed, 2 wrong usage, 3 stopped early (no server, disk full),
130 Ctrl-C.
"""

import argparse

from server.commands.target_flags import add_server_flags
from server.config.value_types import AnyParser, deadline, integer, text

_EXAMPLES = """\
example:
  quire batch in.jsonl -o out.jsonl --model ./my-model
  quire batch in.jsonl -o out.jsonl --url http://127.0.0.1:8000   again: goes on
"""


def add_batch(commands: "argparse._SubParsersAction[AnyParser]") -> None:
    """Add `batch`."""
    parser = commands.add_parser(
        "batch",
        help="answer the requests of an OpenAI batch file",
        description="Answer an OpenAI batch file, in its order. What is there already is kept.",
        usage="quire batch IN.jsonl -o OUT.jsonl [--url URL | --model MODEL] [flags]",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("input", metavar="IN.jsonl", help="input file: lines of custom_id, method, url, body")
    add("-o", "--output", required=True, type=text, metavar="FILE", help="output file: one line per answer or error")
    add("--model", type=text, metavar="M", help="start a temporary server for M")
    add("--concurrency", type=integer(1, 1024), default=64, metavar="N", help="requests at once (64)")
    add(
        "--retries", type=integer(0, 1000), default=8, metavar="N", help="retries per line while the server is busy (8)"
    )
    add("--timeout", type=deadline, default=3600.0, metavar="S", help="time limit of one request in seconds (3600)")
    add_server_flags(parser, url_help="a running server (http://127.0.0.1:8000)")


def _run(arguments: argparse.Namespace) -> int:
    from server.commands.batch.run import run

    return run(arguments)
