"""Compiles the C files of this folder and declares their functions; the ops of bf16 on the CPU take them once loaded.

Compilation.start() runs the C compiler beside the loading of weights; finish() waits and loads the library. A machine
without a compiler, or whose compiler fails, has the ops of torch. No result is kept on disk, so nothing that another
program wrote is ever loaded. loaded() is None until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_SOURCES = tuple(
    str(Path(__file__).with_name(name)) for name in ("threads.c", "rows.c", "products.c", "prompts.c", "layers.c")
)
_LIBRARY = "native.so"
_COMPILERS = ("cc", "gcc", "clang")
# Sums may be reordered, so that loops become vectors; numbers that are not finite keep their meaning
_FLAGS = (
    "-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-fassociative-math", "-ffp-contract=fast",
)  # fmt: skip
_X86_FLAGS = ("-mprefer-vector-width=512",)
_TIMEOUT_S = 60.0

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# name → its arguments: pointers, numbers, floats
_FUNCTIONS = {
    "use_threads": (_P,) * 3 + (_N,),
    "rms_norm": (_P,) * 5 + (_N,) * 2 + (_F,),
    "silu_and_mul": (_P,) * 2 + (_N,) * 2,
    "norm_rope_write_kv": (_P,) * 9 + (_N,) * 10 + (_F,),
    "attend": (_P,) * 6 + (_N,) * 14 + (_F,),
    "quantize_rows": (_P,) * 3 + (_N,) * 2 + (_F,),
    "unpack_int4": (_P,) * 3 + (_N,) * 3,
    "scale_sums": (_P,) * 4 + (_N,) * 2,
}
# those of products.c, prompts.c and layers.c, if use_products() says so
_PRODUCTS = {
    "bf16_linear": (_P,) * 4 + (_N,) * 4,
    "int8_linear": (_P,) * 7 + (_N,) * 4,
    "rounded_int8_linear": (_P,) * 8 + (_N,) * 4 + (_F,),
    "int4_linear": (_P,) * 5 + (_N,) * 4,
    "attend_prompts": (_P,) * 8 + (_N,) * 14 + (_F,) * 2,
    "layers_scratch": (_P,) + (_N,) * 3,
    "run_layers": (_P,) * 7,
}

_ALL_PRODUCTS = 2


class Library(ctypes.CDLL):
    """The functions, by name."""

    products_level = 0  # see products_level()


_loaded: list[Library] = []  # a registry of at most one: a process has one kind of CPU


@dataclass
class Compilation:
    """A C compiler at work, with its folder."""

    compiler: str
    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]
    started_s: float

    @classmethod
    def start(cls) -> Compilation | None:
        """Start to compile; None if there is no compiler, or the library is loaded."""
        found = next((path for name in _COMPILERS if (path := shutil.which(name)) is not None), None)
        if found is None or _loaded:
            return None
        try:
            folder = tempfile.TemporaryDirectory(prefix="quire-native-")
            flags = (*_FLAGS, *(_X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()))
            command = [found, *flags, "-o", str(Path(folder.name) / _LIBRARY), *_SOURCES, "-lm"]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that kill() ends what the compiler has started, too
            )
        except OSError as error:  # a folder that is left is removed with its object
            logger.warning("native kernels not compiled compiler=%r error=%r", found, str(error))
            return None
        return cls(found, process, folder, time.monotonic())

    def give_up(self) -> None:
        """End the compiler and remove its folder."""
        with self.folder:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, and is left behind
            self.process.wait(timeout=1.0)
        if self.process.stderr is not None:
            self.process.stderr.close()

    def finish(self) -> bool:
        """Wait for the compiler and load its library; return whether it is loaded. Blocks, for a minute at most."""
        with self.folder:
            try:
                _, message = self.process.communicate(timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._kill()
                message = f"not done after {_TIMEOUT_S:.0f} s".encode()
            try:
                if self.process.returncode != 0:
                    raise OSError(message.decode(errors="replace")[-400:])
                library = Library(str(Path(self.folder.name) / _LIBRARY))
            except OSError as error:
                logger.warning("native kernels not compiled compiler=%r error=%r", self.compiler, str(error))
                return False
        library.products_level = library.use_products(_ALL_PRODUCTS)
        for name, arguments in (_FUNCTIONS | (_PRODUCTS if library.products_level else {})).items():
            function = library[name]
            function.argtypes, function.restype = arguments, _N if name == "layers_scratch" else None
            setattr(library, name, function)
        _share_threads(library)
        _loaded[:] = [library]
        logger.info("native kernels compiler=%r compiled_s=%.2f", self.compiler, time.monotonic() - self.started_s)
        return True


@contextlib.contextmanager
def compiled_beside(*, is_wanted: bool) -> Iterator[None]:
    """Compile and load the library, if it is wanted, while the body of the `with` statement runs."""
    compilation = Compilation.start() if is_wanted else None
    try:
        yield
    except BaseException:
        if compilation is not None:
            compilation.give_up()
        raise
    if compilation is not None:
        compilation.finish()


def loaded() -> Library | None:
    """Return the library, or None before finish()."""
    return _loaded[0] if _loaded else None


def products_level() -> int:
    """Return 1 if products.c's functions are loaded, 2 if they use AMX, else 0."""
    library = loaded()
    return 0 if library is None else library.products_level


def unload() -> None:
    """Return to the ops of torch."""
    _loaded.clear()


def _share_threads(library: Library) -> None:
    """Give the library torch's own threads, if they are those of GNU OpenMP, whose entry points torch makes global."""
    try:
        everything = ctypes.CDLL(None)
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        entries = [ctypes.cast(everything[name], _P) for name in names]
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no such handle
        entries = [_P(None)] * 3
    library.use_threads(*entries, torch.get_num_threads())
