"""The grammar check process: test-compiles grammars, and can be killed if one takes too long. Never torch.

    python -m engine.grammar_check_process FOLDER
server/structured_output/compile_check.py starts and kills it. Input and output are lines of JSON: first it writes a
GrammarVerdict on the tokenizer of FOLDER, then one for each GrammarSpec that it reads. It exits at the end of its
input. A check compiles the grammar and makes the first mask, on a stack far smaller than the engine's: a grammar that
passes here cannot overflow the engine's stack.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.grammar.compiler import GrammarCompiler
from engine.interface.child_process import die_with_parent
from engine.interface.errors import GrammarError, ServiceError
from engine.interface.protocol import GrammarSpec, GrammarVerdict

_STACK_BYTES = 1 << 20
_MAX_ADDRESS_BYTES = 6 << 30


def serve(folder: Path, *, requests: BinaryIO, verdicts: BinaryIO) -> None:
    """Write a verdict on the tokenizer, then one for each request until the input ends."""
    try:
        compiler = GrammarCompiler.from_folder(folder)
    except ServiceError as error:
        _send(verdicts, GrammarVerdict(error.code, error.message))
        return
    _send(verdicts, GrammarVerdict())
    for line in requests:
        _send(verdicts, _try(compiler, msgspec.json.decode(line, type=GrammarSpec)))


def _try(compiler: GrammarCompiler, spec: GrammarSpec) -> GrammarVerdict:
    verdict = GrammarVerdict()

    def compile_it() -> None:
        try:
            compiler.compile(spec)
        except ServiceError as error:
            verdict.code, verdict.message = error.code, error.message
        except MemoryError:
            verdict.code, verdict.message = GrammarError.code, "It needs too much memory."
        except BaseException as error:  # a panic of Rust is no Exception
            verdict.code, verdict.message = GrammarError.code, f"The compiler failed ({type(error).__name__})."

    thread = threading.Thread(target=compile_it)
    thread.start()
    thread.join()
    return verdict


def _send(verdicts: BinaryIO, verdict: GrammarVerdict) -> None:
    verdicts.write(msgspec.json.encode(verdict) + b"\n")
    verdicts.flush()


def _limit_memory() -> None:
    """Limit this process's memory, so that a grammar that needs too much fails only here."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        is_open = hard == resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESS_BYTES if is_open else min(hard, _MAX_ADDRESS_BYTES), hard))


def main() -> int:
    """Entry point of `python -m engine.grammar_check_process FOLDER`."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    threading.stack_size(_STACK_BYTES)
    verdicts = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a library prints goes to stderr
    serve(Path(sys.argv[1]), requests=sys.stdin.buffer, verdicts=verdicts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
