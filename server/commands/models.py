"""`quire models`: the ids that people search for, whether they are served, and the memory of their weights.

The list is models/known_models.json, made by the engine's arithmetic (tests/known_models.py). Never torch.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from engine.interface.units import GIB, format_count
from server.config.known_words import KNOWN_MODELS, is_found
from server.config.value_types import AnyParser, UsageError, text

_EXAMPLES = """\
examples:
  quire models                all that is listed
  quire models qwen3          those with this word in their id
  quire doctor MODEL          any folder or hub id, also one that is not listed
"""


def add_models(commands: "argparse._SubParsersAction[AnyParser]") -> None:
    """Add `models`."""
    parser = commands.add_parser(
        "models",
        help="list models by name, with their memory",
        description="List models that people search for: served or not, GiB of weights by precision.",
        usage="quire models [WORD] [--json]",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("word", nargs="?", type=text, metavar="WORD", help="show ids with this word alone")
    parser.add_argument("--json", action="store_true", help="print the list as JSON, sizes in bytes")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def _run(arguments: argparse.Namespace) -> int:
    table = json.loads(KNOWN_MODELS.read_text(encoding="utf-8"))
    word = arguments.word or ""
    found = {kind: [row for row in rows if is_found(word, row["model"])] for kind, rows in table.items()}
    if not any(found.values()):
        raise UsageError(
            f"No listed model has {arguments.word!r} in its id. It may be served all the same: quire doctor MODEL says."
        )
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(_lines(found["served"], found["unserved"])))
    return 0


def _lines(served: list[dict[str, Any]], unserved: list[dict[str, Any]]) -> Iterator[str]:
    width = max([len(row["model"]) for row in (*served, *unserved)])
    if served:
        yield f"{'MODEL':<{width}}  {'SIZE':>7}{'BF16':>8}{'FP8':>8}{'INT4':>8}   GiB of weights on a GPU"
    for row in served:
        sizes = "".join(f"{row[name] / GIB:>8,.1f}" for name in ("bf16", "fp8", "int4"))
        note = ", ".join(filter(None, ["its text alone" if row["is_text_part"] else "", row["note"]]))
        yield f"{row['model']:<{width}}  {format_count(row['parameters']):>7}{sizes}   {note}".rstrip()
    if served:
        yield ""
        yield "Serve one: quire serve MODEL [--quantization fp8|int4]. Whether it fits here: quire doctor MODEL."
    if served and unserved:
        yield ""
    for row in unserved:
        instead = f"; instead: quire serve {row['instead']}" if row["instead"] else ""
        yield f"{row['model']:<{width}}  not served: {row['why']}{instead}"
