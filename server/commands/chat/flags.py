"""The flags of `quire chat`. Imports argparse; server/commands/chat/run.py is imported when the command runs.

Exit codes: 0 left or answered, 1 the question from a pipe was not answered, 2 wrong usage, 3 no server, 130 Ctrl-C.
"""

import argparse

from server.commands.target_flags import add_server_flags
from server.config.value_types import AnyParser, integer, text

_EXAMPLES = """\
examples:
  quire chat                                         /help lists what it knows
  git diff | quire chat --system "Review this" Qwen/Qwen3-0.6B > review.txt
"""


def add_chat(commands: "argparse._SubParsersAction[AnyParser]") -> None:
    """Add `chat`."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to the server at --url; without one, a server is started and stopped after.",
        usage="quire chat [MODEL] [flags]",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("model", nargs="?", type=text, metavar="MODEL", help="name, folder or hub id (the server's, or the demo)")
    add("--system", type=text, metavar="TEXT", help="system message")
    add("--temperature", type=text, metavar="T", help="sampling temperature, 0 to 2 (the model's own)")
    add("--max-tokens", type=integer(1, 2**24), metavar="N", help="limit of one answer (no limit)")
    add("--thinking", choices=("dim", "hidden"), default="dim", metavar="HOW", help="reasoning: dim or hidden (dim)")
    add("--no-markdown", action="store_true", help="show plain text instead of rendered Markdown")
    add_server_flags(parser, url_help="a running server (http://127.0.0.1:8000)")


def _run(arguments: argparse.Namespace) -> int:
    from server.commands.chat.run import run

    return run(arguments)
