"""The house stays as docs/architecture.md draws it: server → engine → models → kernels, and torch only below."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "engine", "models", "kernels", "benchmarks", "deploy")

# what each package may import of ours
MAY_IMPORT = {
    "kernels": {"kernels"},
    "models": {"models", "kernels"},
    "engine": {"engine", "models", "kernels"},
    "server": {"server", "engine"},
    "benchmarks": {"benchmarks", "server", "engine", "models", "kernels"},
    "deploy": {"deploy", "server", "engine"},
}
# `quire bench` lives in benchmarks, which reaches everything: one file of server leads there, inside its functions
BENCH_COMMAND = "server/commands/bench/run.py"
# the only rooms of engine that server may enter
ENGINE_FOR_SERVER = {
    "engine.interface.client",
    "engine.interface.config",
    "engine.interface.control",
    "engine.interface.fit_report",
    "engine.interface.errors",
    "engine.interface.logs",
    "engine.interface.metrics",
    "engine.interface.child_process",
    "engine.process",
    "engine.interface.protocol",
    "engine.interface.units",
    "engine.interface.transport",
}
# engine files that hold tensors; all others are plain Python
ENGINE_WITH_TORCH = {
    "adapters",
    "connectors",
    "cuda_graph",
    "device_state",
    "input_batch",
    "device",
    "doctor",
    "kv_cache",
    "load",
    "memory",
    "model_runner",
    "offline",
    "pooler",
    "process_group",
    "prompt_logprobs",
    "rehearsal",
    "sampler",
    "setup",
    "setup_facts",
    "one_shot_all_reduce",
    "staging",
}
# calls that make the host wait for the device, or copy off it; each exception with its reason
SYNCS = {"item", "tolist", "cpu"}
SYNC_ALLOWED = {
    "kernels/attention/torch_ref.py": "the oracle walks its rows on the host, and is no backend for speed",
    "models/quantization/bitsandbytes.py": "JSON that lies in tensors is read while the model loads",
}


def source_files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def parsed(path: Path) -> ast.Module:
    """Parse a file. Afresh each time: top_level() changes the tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Yield every import with the dotted name it needs: for `from a import b` that is a, and a.b if it is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node, node.module
            for alias in node.names:
                if (ROOT / node.module.replace(".", "/") / f"{alias.name}.py").exists():
                    yield node, f"{node.module}.{alias.name}"


def top_level(tree: ast.Module) -> ast.Module:
    """Return the module without the bodies of functions and of `if TYPE_CHECKING`."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            node.body = [ast.Pass()]
            return node

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
            node.body = [ast.Pass()]
            return node

        def visit_If(self, node: ast.If) -> ast.AST:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = [ast.Pass()]
            return self.generic_visit(node)

    return Strip().visit(tree)


def is_torch_free(path: Path) -> bool:
    package = relative(path).split("/")[0]
    return package == "server" or (package == "engine" and path.stem not in ENGINE_WITH_TORCH)


def test_imports_go_down_only() -> None:
    found = []
    for path in source_files():
        package = relative(path).split("/")[0]
        may_import = MAY_IMPORT[package] | ({"benchmarks"} if relative(path) == BENCH_COMMAND else set())
        for node, name in imports(parsed(path)):
            top = name.split(".")[0]
            is_ours = top in PACKAGES or top == "tests"
            is_closed_room = package == "server" and top == "engine" and name not in {"engine", *ENGINE_FOR_SERVER}
            if is_ours and (top not in may_import or is_closed_room):
                found.append(f"{relative(path)}:{node.lineno} imports {name}")
    assert found == []


def test_plain_python_files_have_no_torch() -> None:
    found = []
    for path in filter(is_torch_free, source_files()):
        tree = parsed(path)
        for node, name in imports(tree):
            if name.split(".")[0] in ("torch", "triton"):
                found.append(f"{relative(path)}:{node.lineno} imports {name}")
        for node, name in imports(top_level(tree)):
            parts = name.split(".")
            if parts[0] in ("models", "kernels", "benchmarks") or (
                parts[0] == "engine" and len(parts) > 1 and parts[1] in ENGINE_WITH_TORCH
            ):
                found.append(f"{relative(path)}:{node.lineno} imports {name}, which imports torch")
    assert found == []


@pytest.mark.parametrize("module", ["server.cli", "server.launcher.launcher", "server.http.worker", "engine.process"])
def test_process_starts_without_torch_and_transformers(module: str) -> None:
    heavy = ["torch", "transformers"] + (
        ["fastapi", "rich"] if module in ("server.cli", "server.launcher.launcher") else []
    )
    code = f"import sys, {module}; sys.exit(' '.join(m for m in {heavy!r} if m in sys.modules) or 0)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, f"{module} imports {result.stderr}"


def test_every_init_is_empty() -> None:
    inits = [path for path in source_files() if path.name == "__init__.py"]
    assert len(inits) >= len(PACKAGES)
    assert [relative(path) for path in inits if path.read_text() != ""] == []


def test_every_folder_with_code_is_a_package() -> None:
    assert [relative(path.parent) for path in source_files() if not (path.parent / "__init__.py").exists()] == []


def test_no_relative_and_no_star_imports() -> None:
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in source_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.level > 0 or any(alias.name == "*" for alias in node.names))
    ]
    assert found == []


def test_models_and_kernels_never_wait_for_the_device() -> None:
    found = [
        f"{relative(path)}:{node.lineno} .{node.func.attr}()"
        for package in ("models", "kernels")
        for path in sorted((ROOT / package).rglob("*.py"))
        if relative(path) not in SYNC_ALLOWED
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SYNCS
    ]
    assert found == []


def test_every_module_says_what_it_owns() -> None:
    files = [path for path in source_files() if path.name != "__init__.py"]
    assert [relative(path) for path in files if not ast.get_docstring(parsed(path))] == []
