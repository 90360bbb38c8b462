"""Work that begins before torch is imported: it never fails, and reads a checkpoint only if memory has room for it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from engine.interface.config import EngineConfig
from engine.startup import head_start
from tests.support.compiled_kernels import needs_triton


def test_the_weights_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "model-2.safetensors").write_bytes(b"y" * 500)
    (tmp_path / "consolidated.safetensors").write_bytes(b"z" * 1500)  # the same weights again, which nothing loads
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert head_start.read_ahead(tmp_path) == 1500


def test_a_single_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 700)
    assert head_start.read_ahead(tmp_path) == 700


def test_a_file_is_read_where_the_system_cannot_send_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*numbers: int) -> int:
        raise OSError(22, "Invalid argument")

    (tmp_path / "model.safetensors").write_bytes(b"x" * 700)
    monkeypatch.setattr(head_start.os, "sendfile", fail)
    assert head_start.read_ahead(tmp_path) == 700


def test_a_checkpoint_larger_than_memory_is_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    monkeypatch.setattr(head_start, "_available_bytes", lambda: 1200)
    assert head_start.read_ahead(tmp_path) == 0


def test_a_folder_that_is_not_there_fails_where_it_is_loaded(tmp_path: Path) -> None:
    assert head_start.read_ahead(tmp_path / "nothing") == 0


def test_each_part_of_a_head_start_is_named_when_it_has_ended(tmp_path: Path) -> None:
    begun = head_start.begin_head_start(EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy"))
    begun.join()
    assert begun.describe().split()[::2] == ["torch"]
    begun = head_start.begin_head_start(EngineConfig(model=str(tmp_path), device="cpu"))
    begun.join()
    assert sorted(begun.describe().replace(",", "").split()[::2]) == ["torch", "weights"]


def test_triton_is_imported_when_torch_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(head_start, "context_maker", lambda: lambda: False)
    monkeypatch.setattr(head_start, "torch_linker", lambda: lambda: order.append("linked"))
    monkeypatch.setattr(head_start, "hash_triton", lambda: order.append("hashed"))
    head_start.begin_head_start(EngineConfig(model=str(tmp_path), device="cuda", load_format="dummy")).join()
    assert order == ["linked", "hashed"]


def test_triton_is_hashed_where_torch_could_not_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise OSError

    order: list[str] = []
    monkeypatch.setattr(head_start, "context_maker", lambda: lambda: False)
    monkeypatch.setattr(head_start, "torch_linker", lambda: fail)
    monkeypatch.setattr(head_start, "hash_triton", lambda: order.append("hashed"))
    head_start.begin_head_start(EngineConfig(model=str(tmp_path), device="cuda", load_format="dummy")).join()
    assert order == ["hashed"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch links itself")
def test_torch_finds_its_libraries_linked() -> None:
    script = (
        "import sys\n"
        "from engine.startup.head_start import torch_linker\n"
        "assert torch_linker()()\n"
        "assert 'torch' not in sys.modules\n"
        "linked = open('/proc/self/maps').read().count('libtorch_cpu.so')\n"
        "import torch\n"
        "assert linked == open('/proc/self/maps').read().count('libtorch_cpu.so') > 0\n"
        "assert torch.ones(2).sum() == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_without_torch_nothing_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_start.importlib.util, "find_spec", lambda name: None)
    assert not head_start.torch_linker()()


@pytest.mark.slow
@pytest.mark.parametrize("is_read_here", [True, False])
def test_the_vocabulary_is_loaded_without_an_import_that_waits_for_the_linker(is_read_here: bool) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from engine.grammar import compiler\n"
        "import models\n"
        f"if not {is_read_here}:\n"
        "    compiler.read_vocabulary = lambda text, end: None\n"
        "loader = compiler.CompilerLoader(Path(models.__file__).parent / 'demo' / 'checkpoint')\n"
        "load = loader.prepare()\n"
        "before = set(sys.modules)\n"
        "load()\n"
        "assert loader.get().num_words\n"
        "new = set(sys.modules) - before\n"
        "print([name for name in new if str(sys.modules[name].__spec__.origin).endswith('.so')])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


def test_files_that_are_read_whole_have_their_content(tmp_path: Path) -> None:
    (tmp_path / "some").write_bytes(b"0123456789")
    (tmp_path / "empty").write_bytes(b"")
    module = ModuleType("reader")
    code = (
        "def chunks(path):\n"
        "    with open(path, 'rb') as file:\n"
        "        while chunk := file.read(4):\n"
        "            yield bytes(chunk)\n"
        "def text(path):\n"
        "    with open(path) as file:\n"
        "        return file.read(4)\n"
    )
    exec(code, vars(module))
    with head_start._whole_files(module):
        assert list(module.chunks(tmp_path / "some")) == [b"0123456789"]
        assert list(module.chunks(tmp_path / "empty")) == []
        assert module.text(tmp_path / "some") == "0123"
    assert list(module.chunks(tmp_path / "some")) == [b"0123", b"4567", b"89"]


@needs_triton
@pytest.mark.slow
def test_the_hash_of_triton_is_its_own() -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    with head_start._whole_files(cache):
        whole = cache.triton_key.__wrapped__()
    assert whole == cache.triton_key.__wrapped__()


def test_a_machine_without_a_driver_has_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(head_start.ctypes, "CDLL", fail)
    assert not head_start.context_maker()()
    assert not head_start.torch_linker()()


def test_the_drivers_functions_are_found_before_a_thread_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    class Driver:
        def __getattr__(self, name: str) -> Callable[..., int]:
            found.append(name)
            return lambda *arguments: 0

    monkeypatch.setattr(head_start.ctypes, "CDLL", lambda name: Driver())
    create = head_start.context_maker()
    before = found.copy()
    assert len(before) == 3
    assert create()
    assert found == before
