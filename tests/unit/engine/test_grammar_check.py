"""What the process that tries grammars says where compiling does anything but to succeed."""

import pytest

from engine.grammar_check_process import _try
from engine.interface.errors import GrammarError, UnsupportedFeature
from engine.interface.protocol import GrammarSpec, GrammarVerdict
from tests.support.grammar_tokens import compiler

SPEC = GrammarSpec('start: "ab"')


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception."""


class Failing:
    def __init__(self, error):
        self.error = error

    def compile(self, spec):
        raise self.error


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (GrammarError("No."), GrammarVerdict("invalid_grammar", "No.")),
        (UnsupportedFeature("Not here."), GrammarVerdict("unsupported_feature", "Not here.")),
        (MemoryError(), GrammarVerdict("invalid_grammar", "It needs too much memory.")),
        (ValueError("inner words"), GrammarVerdict("invalid_grammar", "The compiler failed (ValueError).")),
        (Panic("inner words"), GrammarVerdict("invalid_grammar", "The compiler failed (Panic).")),
    ],
)
def test_whatever_compiling_raises_is_a_refusal(error, verdict):
    assert _try(Failing(error), SPEC) == verdict


def test_what_compiles_has_no_code():
    assert _try(compiler(), SPEC) == GrammarVerdict()
