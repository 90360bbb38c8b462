"""What serving needs of this machine beside the engine: a compiler, disk, a port, packages. Never torch."""

import os
import platform
import shutil
import sysconfig
from pathlib import Path

import msgspec

from engine.interface.config import LaunchConfig
from engine.interface.errors import StartupError
from server.config.model_source import check_kernels_package
from server.config.version import package_version
from server.launcher.listener import bind


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """This machine without its GPUs. Sizes in bytes."""

    quire: str
    python: str
    system: str
    c_compiler: str | None  # which Triton calls for every kernel's launcher
    has_python_headers: bool  # which that needs
    cache: str  # folder of downloaded models
    cache_free: int
    address: str
    port_problem: str | None  # why the port cannot be listened on
    kernels_problem: str | None  # why the package `kernels` is not ours


def look_at_host(address: LaunchConfig) -> Host:
    """Look. The port is bound for a moment."""
    cache = _hub_cache()
    return Host(
        quire=package_version(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        c_compiler=_c_compiler(),
        has_python_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        cache=str(cache),
        cache_free=_free_bytes(cache),
        address=f"{address.host}:{address.port}",
        port_problem=_port_problem(address),
        kernels_problem=_kernels_problem(),
    )


def _c_compiler() -> str | None:
    """The compiler that Triton takes: CC, else gcc, else clang."""
    names = [name for name in (os.environ.get("CC"), "gcc", "clang") if name]
    return next((path for path in map(shutil.which, names) if path is not None), None)


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _free_bytes(folder: Path) -> int:
    """Free bytes where a folder is, or would be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _port_problem(address: LaunchConfig) -> str | None:
    try:
        for listener in bind(address):
            listener.close()
    except StartupError as error:
        return error.message
    return None


def _kernels_problem() -> str | None:
    try:
        check_kernels_package()
    except StartupError as error:
        return error.message
    return None
