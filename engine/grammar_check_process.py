"""A process that tries grammars, so that one that takes too long or too much can be killed. Never torch.

    python -m engine.grammar_check_process FOLDER       (started and killed by
    server/structured_output/compile_check.py)
Lines of JSON: out comes a GrammarVerdict on the tokenizer of FOLDER once it is loaded, then for each GrammarSpec that
comes in, one on it. Ends with its input. Trying means to compile and to make the first mask, on a stack far smaller
than the engine's: what passes here cannot overflow there.
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
    """Answer until the input ends."""
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
    """Let a grammar that needs too much memory end this process, and no other."""
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
    os.dup2(2, 1)  # whatever a library prints is no verdict
    serve(Path(sys.argv[1]), requests=sys.stdin.buffer, verdicts=verdicts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
