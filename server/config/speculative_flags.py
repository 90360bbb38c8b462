"""The flags of speculation, for every command that makes an engine. Imports argparse only."""

import argparse
from typing import TYPE_CHECKING

from engine.interface.errors import StartupError
from server.config.value_types import integer

if TYPE_CHECKING:
    from engine.interface.config import SpeculativeConfig

_METHODS = ("ngram",)
_DETAILS = ("--num-speculative-tokens", "--ngram-min", "--ngram-max")


def add_speculative_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags to a parser or a group of it."""
    add = group.add_argument
    add("--speculative", choices=_METHODS, metavar="HOW", help="ngram: guess what followed the same tokens earlier")
    add("--num-speculative-tokens", type=integer(1, 32), metavar="N", help="tokens guessed at once (4)")
    add("--ngram-min", type=integer(1, 32), metavar="N", help="tokens that must have stood there before (2)")
    add("--ngram-max", type=integer(1, 64), metavar="N", help="the longest match preferred (4, or --ngram-min)")


def speculative_of(arguments: argparse.Namespace) -> "SpeculativeConfig | None":
    """Return what was asked for. Raises StartupError for flags that do not fit together."""
    from engine.interface.config import SpeculativeConfig

    given = (arguments.num_speculative_tokens, arguments.ngram_min, arguments.ngram_max)
    if arguments.speculative is None:
        for flag, value in zip(_DETAILS, given, strict=True):
            if value is not None:
                raise StartupError(f"{flag} {value} needs --speculative ngram.", exit_code=2)
        return None
    default = SpeculativeConfig()
    num_tokens, shortest, longest = given
    shortest = shortest or min(default.ngram_min, longest or default.ngram_min)
    longest = longest or max(default.ngram_max, shortest)
    if longest < shortest:
        raise StartupError(f"--ngram-max {longest} is less than --ngram-min {shortest}.", exit_code=2)
    return SpeculativeConfig(
        method=arguments.speculative,
        num_tokens=num_tokens or default.num_tokens,
        ngram_min=shortest,
        ngram_max=longest,
    )
