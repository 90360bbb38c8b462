"""The grammar check process: test-compiles grammars, and can be killed if one takes too long. Never torch.

    python -m engine.grammar_check_process FOLDER
server/structured_output/compile_check.py starts and kills it. Input and output are lines of JSON: first it writes a
GrammarVerdict on the tokenizer of FOLDER, then one for each GrammarCheck that it reads. It exits at the end of its
input. A check compiles the grammar and makes the first mask, on a stack far smaller than the engine's: a grammar that
passes here cannot overflow the engine's stack.

Each check runs in a fork, which shares the loaded tokenizer. Of several, those that have run least go on and the others
are stopped, in turns of _TURN_S: a cheap grammar never waits for a costly one to end.
"""

import gc
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.grammar.compiler import GrammarCompiler
from engine.interface.child_process import die_with_parent
from engine.interface.errors import GrammarError, ServiceError
from engine.interface.protocol import GrammarCheck, GrammarSpec, GrammarVerdict

_STACK_BYTES = 1 << 20
_MAX_MORE_BYTES = 1 << 30  # of address space, beyond the tokenizer's
_MAX_RUNNING = 2
_TURN_S = 0.02
_NICE = 5  # of the forks: steps of the engine on the CPU and the process that stops them come first


class _Fork:
    """A check in a child process. `begun_s`: of its turn; None while it is stopped."""

    def __init__(self, check: GrammarCheck, compiler: GrammarCompiler) -> None:
        self.id, self.limit_s = check.id, check.limit_s
        self.used_s = 0.0
        self.begun_s: float | None = time.monotonic()
        assert check.spec is not None
        self.pipe, child_pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _compile_in_child(compiler, check.spec, child_pipe)
        os.close(child_pipe)
        os.read(self.pipe, 1)  # until it dies with this process: stopped before, it would outlive it with its pipes

    def count(self, now: float) -> None:
        """Add the time of the turn so far."""
        if self.begun_s is not None:
            self.used_s, self.begun_s = self.used_s + now - self.begun_s, now

    def turn(self, *, runs: bool, now: float) -> None:
        """Let it run or stop it."""
        if runs != (self.begun_s is not None):
            os.kill(self.pid, signal.SIGCONT if runs else signal.SIGSTOP)
            self.begun_s = now if runs else None

    def end(self) -> bytes:
        """Kill it; return the verdict that it wrote, if any."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        with os.fdopen(self.pipe, "rb") as pipe:
            return pipe.read()


class _Forks:
    """The checks in progress, and their share of the processor."""

    def __init__(self, compiler: GrammarCompiler, send: Callable[[GrammarVerdict], None]) -> None:
        self._compiler = compiler
        self._send = send
        self._forks: dict[int, _Fork] = {}
        self.selector = selectors.DefaultSelector()

    def start(self, check: GrammarCheck) -> None:
        """Begin a check, or give one up."""
        if check.spec is None:
            if check.id in self._forks:
                self._remove(self._forks[check.id])
            return
        fork = self._forks[check.id] = _Fork(check, self._compiler)
        self.selector.register(fork.pipe, selectors.EVENT_READ, fork)
        self.share()  # at once: many that run would slow the next forks down

    def finish(self, fork: _Fork) -> None:
        """Send the verdict of a check that has written it, or has died without one."""
        if fork.id not in self._forks:
            return  # ended in the same turn
        written = self._remove(fork)
        message = "is nested too deeply, or needs too much memory, to be compiled."
        verdict = GrammarVerdict(GrammarError.code, message, is_final=False)
        if written:
            verdict = msgspec.json.decode(written, type=GrammarVerdict)
        verdict.id = fork.id
        self._send(verdict)

    def share(self) -> float | None:
        """End the checks over their limit, give the turns; return the seconds until it must be called again."""
        now = time.monotonic()
        for fork in list(self._forks.values()):
            fork.count(now)
            if fork.used_s > fork.limit_s:
                self._remove(fork)
                message = f"takes longer to compile than {fork.limit_s:g} s, the limit."
                self._send(GrammarVerdict(GrammarError.code, message, fork.id, is_final=False))
        waiting = sorted(self._forks.values(), key=lambda fork: fork.used_s)
        for fork in waiting[_MAX_RUNNING:]:
            fork.turn(runs=False, now=now)
        for fork in waiting[:_MAX_RUNNING]:
            fork.turn(runs=True, now=now)
        if not waiting:
            return None
        return _TURN_S if len(waiting) > _MAX_RUNNING else max(0.0, min(f.limit_s - f.used_s for f in waiting)) + 0.001

    def _remove(self, fork: _Fork) -> bytes:
        del self._forks[fork.id]
        self.selector.unregister(fork.pipe)
        return fork.end()


def serve(folder: Path, *, requests: int, send: Callable[[GrammarVerdict], None]) -> None:
    """Send a verdict on the tokenizer, then one for each line of the file descriptor `requests` until its end."""
    try:
        compiler = GrammarCompiler.from_folder(folder)
    except ServiceError as error:
        send(GrammarVerdict(error.code, error.message))
        return
    gc.freeze()  # so that no fork copies the pages that it only reads
    send(GrammarVerdict())
    forks = _Forks(compiler, send)
    forks.selector.register(requests, selectors.EVENT_READ)
    unread = b""
    while True:
        for key, _ in forks.selector.select(forks.share()):
            if key.data is not None:
                forks.finish(key.data)
                continue
            data = os.read(requests, 1 << 16)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                forks.start(msgspec.json.decode(line, type=GrammarCheck))


def _compile_in_child(compiler: GrammarCompiler, spec: GrammarSpec, pipe: int) -> None:
    """Write the verdict on a grammar to the pipe, and end this process."""
    try:
        die_with_parent()
        os.write(pipe, b" ")
        os.nice(_NICE)
        os.closerange(3, pipe)  # the server reads the end of this process from the pipes that it shares
        os.closerange(pipe + 1, pipe + 256)
        _limit_memory()
        with os.fdopen(pipe, "wb") as verdicts:
            verdict = _try(compiler, spec)
            verdict.cpu_s = time.process_time()
            verdicts.write(msgspec.json.encode(verdict))
    finally:
        os._exit(0)


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


def _limit_memory() -> None:
    """Limit this process's memory, so that a grammar that needs too much fails only here."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        is_open = hard == resource.RLIM_INFINITY
        limit = used + _MAX_MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit if is_open else min(hard, limit), hard))


def main() -> int:
    """Entry point of `python -m engine.grammar_check_process FOLDER`."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(_STACK_BYTES)
    verdicts = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a library prints goes to stderr

    def send(verdict: GrammarVerdict) -> None:
        verdicts.write(msgspec.json.encode(verdict) + b"\n")
        verdicts.flush()

    serve(Path(sys.argv[1]), requests=sys.stdin.fileno(), send=send)
    return 0


if __name__ == "__main__":
    sys.exit(main())
