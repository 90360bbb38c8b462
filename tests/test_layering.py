"""Rules over all source files: which package may import which, no cycles, where torch may be, sizes of files.

Each rule is a function from a Tree of sources to a list of offenders. It has two tests: the repository has none, and an
offender that is planted is found.
"""

from __future__ import annotations

import ast
import functools
import gc
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "engine", "models", "kernels", "benchmarks", "deploy")
PRODUCT = ("server", "engine", "models", "kernels")

# Package → packages that it may import, besides itself. A module at the root of server, engine, models or kernels is a
# row, too. `models` alone: the model families. A longer name goes first: server.http.routes is not in server.http.
MAY_IMPORT = {
    "server.__main__": "server.cli",
    "server.cli": """engine.interface server.commands server.commands.batch server.commands.bench server.commands.chat
        server.commands.doctor server.commands.top server.config server.launcher""",
    "server.commands": "engine.interface server.config server.launcher",
    "server.commands.batch": "server.commands server.config",
    "server.commands.bench": "benchmarks server.config",
    "server.commands.chat": "engine.interface server.commands server.config",
    "server.commands.doctor": "engine.interface server.config server.launcher server.text",
    "server.commands.top": "engine.interface server.commands server.config",
    "server.launcher": "engine.interface server.api server.config server.errors",
    "server.hosted": "engine.interface server.config server.http server.launcher",
    "server.local": """engine.core engine.interface engine.offline server.api server.api.chat server.api.completions
        server.api.embeddings server.config server.generation server.hosted""",
    "server.http": """engine.interface server.api server.api.chat server.api.completions server.api.embeddings
        server.api.messages server.api.responses server.config server.errors server.generation server.http.routes
        server.text""",
    "server.http.routes": """engine.interface server.api server.api.chat server.api.completions server.api.embeddings
        server.api.messages server.api.responses server.config server.errors server.generation server.text""",
    "server.api.chat": """engine.interface server.api server.errors server.generation server.structured_output
        server.text server.text.parsers""",
    "server.api.completions": """engine.interface server.api server.errors server.generation server.structured_output
        server.text""",
    "server.api.embeddings": "engine.interface server.api server.config server.errors server.generation server.text",
    "server.api.messages": """engine.interface server.api server.api.chat server.document_rules server.errors
        server.generation""",
    "server.api.responses": """engine.interface server.api server.api.chat server.document_rules server.errors
        server.generation""",
    "server.api": """engine.interface server.config server.document_rules server.errors server.generation
        server.structured_output server.text""",
    "server.generation": "engine.interface server.errors server.text server.text.parsers",
    "server.structured_output": "engine.interface server.document_rules server.text.parsers",
    "server.config": "engine.interface server.text",
    "server.text": "engine.interface server.text.parsers",
    "server.text.parsers": "",
    "server.errors": "engine.interface",
    "server.document_rules": "",
    "engine.process": """engine.core engine.grammar engine.interface engine.kv_publisher engine.offline
        engine.startup.head_start engine.tensor_parallel""",
    "engine.kv_publisher": "engine.core engine.interface",
    "engine.rank_process": "engine.core engine.interface engine.startup engine.tensor_parallel",
    "engine.grammar_check_process": "engine.grammar engine.interface",
    "engine.offline": "engine.core engine.grammar engine.interface engine.startup engine.tensor_parallel",
    "engine.tune": "engine.interface engine.offline engine.startup",
    "engine.startup.head_start": "engine.interface",
    "engine.startup": """engine.core engine.device engine.grammar engine.interface engine.peers engine.tensor_parallel
        engine.tiers kernels.attention kernels.dispatch kernels.elementwise kernels.native kernels.ops
        kernels.precompile models.build models.config models.errors models.foreign models.layers models.lora
        models.parallel models.registry models.weights""",
    "engine.device": """engine.core engine.interface engine.peers engine.tensor_parallel kernels.attention
        kernels.dispatch kernels.elementwise kernels.inputs kernels.ops kernels.sampling kernels.states models.build
        models.config models.context models.parallel""",
    "engine.tensor_parallel": """engine.core engine.interface engine.peers engine.tiers kernels.all_reduce
        kernels.dispatch models.parallel""",
    "engine.core": "engine.grammar engine.interface engine.peers engine.tiers",
    "engine.peers": "engine.interface",
    "engine.grammar": "engine.interface",
    "engine.tiers": "engine.interface",
    "engine.interface": "",
    "models": """kernels.elementwise kernels.moe kernels.ops models.config models.context models.errors models.layers
        models.parallel models.quantization models.weights""",
    "models.lora": """kernels.linear kernels.lora kernels.ops models.build models.config models.errors models.fields
        models.parallel models.quantization models.weights""",
    "models.foreign": """kernels.attention kernels.elementwise models.config models.context models.errors
        models.registry""",
    "models.build": "models.config models.context models.parallel models.registry models.weights",
    "models.layers": """kernels.attention kernels.dispatch kernels.elementwise kernels.linear kernels.moe kernels.native
        kernels.ops kernels.row_layers kernels.states models.config models.context models.errors models.lora
        models.parallel models.quantization models.weights""",
    "models.config": """kernels.attention kernels.elementwise models.architecture models.errors models.fields
        models.quantization models.registry models.registry_text""",
    "models.quantization": """kernels.e2m1 kernels.linear kernels.moe models.errors models.fields models.parallel
        models.weights""",
    "models.weights": "models.errors",
    "models.known": "",
    "models.registry": """models.architecture models.errors models.known models.registry_experts models.registry_gemma4
        models.registry_hybrid models.registry_latent models.registry_recurrent models.registry_text
        models.registry_vision""",
    "models.registry_experts": "models.architecture",
    "models.registry_gemma4": "models.architecture",
    "models.registry_hybrid": "models.architecture",
    "models.registry_latent": "models.architecture",
    "models.registry_recurrent": "models.architecture",
    "models.registry_text": "models.architecture",
    "models.registry_vision": "models.architecture models.registry_text",
    "models.architecture": "",
    "models.context": "kernels.attention kernels.elementwise kernels.states",
    "models.fields": "models.errors",
    "models.parallel": "kernels.moe kernels.ops",
    "models.errors": "",
    "kernels.ops": """kernels.causal_conv kernels.delta_rule kernels.dispatch kernels.elementwise kernels.inputs
        kernels.linear kernels.lora kernels.mamba2 kernels.moe kernels.sampling""",
    "kernels.precompile": "",
    "kernels.row_layers": "",
    "kernels.sampling": "kernels.attention",
    "kernels.linear": """kernels.attention kernels.dispatch kernels.e2m1 kernels.elementwise kernels.gluon_common
        kernels.native""",
    "kernels.moe": "kernels.dispatch kernels.e2m1 kernels.elementwise kernels.gluon_common kernels.linear",
    "kernels.attention": "kernels.dispatch kernels.elementwise kernels.gluon_common kernels.native",
    "kernels.all_reduce": "kernels.elementwise",
    "kernels.causal_conv": "kernels.states kernels.states_triton",
    "kernels.delta_rule": """kernels.dispatch kernels.gluon_chunks kernels.gluon_common kernels.gluon_scan
        kernels.states kernels.states_triton""",
    "kernels.mamba2": """kernels.dispatch kernels.gluon_chunks kernels.gluon_common kernels.gluon_scan
        kernels.states kernels.states_triton""",
    "kernels.states": "",
    "kernels.states_triton": "kernels.states",
    "kernels.inputs": "",
    "kernels.lora": "",
    "kernels.elementwise": "kernels.native",
    "kernels.native": "",
    "kernels.dispatch": "",
    "kernels.e2m1": "",
    "kernels.gluon_common": "",
    "kernels.gluon_chunks": "",
    "kernels.gluon_scan": "kernels.gluon_chunks kernels.gluon_common kernels.states kernels.states_triton",
    "benchmarks": """engine.core engine.device engine.interface engine.offline engine.startup engine.tensor_parallel
        engine.tiers kernels.all_reduce kernels.attention kernels.causal_conv kernels.delta_rule kernels.e2m1
        kernels.elementwise kernels.gluon_scan kernels.inputs kernels.linear kernels.lora kernels.mamba2 kernels.moe
        kernels.native kernels.ops kernels.precompile kernels.row_layers kernels.sampling kernels.states models.build
        models.config models.context models.errors models.layers models.parallel models.quantization models.weights
        server.config server.http server.text""",
    "deploy": "engine.interface server.api server.hosted server.launcher",
}
# Packages that hold tensors; no other file of server, engine or deploy imports torch, or what imports it
WITH_TORCH = {"engine.startup", "engine.device", "engine.tensor_parallel", "models", "kernels", "benchmarks"}
REACHES_TORCH = {
    "engine.offline": "it is the engine inside the caller's process, which loads the model",
    "engine.tune": "it is a process of its own, which loads the model",
}
# Calls that make the host wait for the device, or copy off it; each exception with its reason
SYNCS = {"item", "tolist", "cpu"}
SYNC_ALLOWED = {
    "kernels/attention/torch_shared.py": "it is a part of the oracle",
    "kernels/attention/torch_ref.py": "the oracle walks its rows on the host, and is no backend for speed",
    "kernels/delta_rule/reference.py": "the specification walks its rows on the host",
    "kernels/mamba2/chunked.py": "it serves on CPUs, where nothing waits; rows of one token alone need no walk",
    "kernels/mamba2/reference.py": "the specification walks its rows on the host",
    "models/quantization/bitsandbytes.py": "JSON that lies in tensors is read while the model loads",
}
MAX_LINES = 400
MIN_LINES = 80  # of a file with a single importer; tests count as importers
# Each file in these folders is a row of a table elsewhere: commands, routes, formats, model families
ROW_FOLDERS = {"server/commands", "server/http/routes", "server/text/parsers", "models"}
ROW_FILES = {"__init__.py", "__main__.py", "flags.py"}


class Import(NamedTuple):
    """One import statement's module."""

    line: int
    name: str  # dotted; of `from a import b` a.b if that is a module, else a
    is_late: bool  # inside a function
    is_for_types: bool  # under `if TYPE_CHECKING`


class _Imported(NamedTuple):
    """What one import statement names, whatever modules there are."""

    line: int
    name: str  # dotted; of `from a import b` a.b
    module: str  # a
    is_late: bool
    is_for_types: bool

    def of(self, modules: set[str]) -> Import:
        return Import(self.line, self.name if self.name in modules else self.module, self.is_late, self.is_for_types)


@dataclass(frozen=True)
class Tree:
    """Sources by path. Rules read nothing else, so that tests can plant offenders."""

    files: Mapping[str, str]

    def paths(self, packages: Iterable[str] = PACKAGES) -> list[str]:
        return [path for path in self.files if path.split("/")[0] in packages]

    def parsed(self, path: str) -> ast.Module:
        return _parse(self.files[path])

    @functools.cached_property
    def imports(self) -> dict[str, list[Import]]:
        """By path: the imports of modules of ours, and of others."""
        modules = {module_of(path) for path in self.files}
        return {path: [found.of(modules) for found in _import_statements(text)] for path, text in self.files.items()}

    @functools.cached_property
    def path_of(self) -> dict[str, str]:
        return {module_of(path): path for path in self.files}


@functools.cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@pytest.fixture(autouse=True, scope="module")
def trees_are_no_garbage() -> Iterator[None]:
    """Let the collector rest, which would visit the trees of all files again and again; drop them at the end."""
    gc.disable()
    yield
    _parse.cache_clear()
    gc.enable()


@functools.cache
def repository() -> Tree:
    paths = [path for package in (*PACKAGES, "tests") for path in sorted((ROOT / package).rglob("*.py"))]
    return Tree({path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths})


def with_planted(path: str, text: str) -> Tree:
    return Tree({**repository().files, path: text})


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def _import_statements(text: str) -> list[_Imported]:
    return list(_imports(_parse(text)))


def _imports(node: ast.AST, *, is_late: bool = False, is_for_types: bool = False) -> Iterator[_Imported]:
    for child in ast.iter_child_nodes(node):
        late = is_late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        for_types = is_for_types or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield _Imported(child.lineno, alias.name, alias.name, late, for_types)
        elif isinstance(child, ast.ImportFrom) and child.module is not None:
            for name in dict.fromkeys(f"{child.module}.{alias.name}" for alias in child.names):
                yield _Imported(child.lineno, name, child.module, late, for_types)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):  # no expression has statements in it
            yield from _imports(child, is_late=late, is_for_types=for_types)


def row_of(module: str) -> str | None:
    """The row of the table that a module belongs to."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in MAY_IMPORT), None)


def is_in(row: str, packages: Iterable[str]) -> bool:
    return any(row == package or row.startswith(f"{package}.") for package in packages)


def cycles(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The strongly connected components of more than one node (R. Tarjan, 1972), each as one line."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[-len(component) :]
            if len(component) > 1:
                found.append(" ↔ ".join(sorted(component)))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def modules_without_a_row(tree: Tree) -> list[str]:
    paths = [path for path in tree.paths() if not path.endswith("__init__.py")]
    return [path for path in paths if row_of(module_of(path)) is None]


def forbidden_imports(tree: Tree) -> list[str]:
    """Imports, type-checking ones included, that the table does not allow."""
    found = []
    for path in tree.paths():
        row = row_of(module_of(path))
        for line, name, is_late, _ in tree.imports[path]:
            if name.split(".")[0] not in (*PACKAGES, "tests"):
                continue
            other = row_of(name) if name in tree.path_of else None
            is_allowed = other is not None and (other == row or other in MAY_IMPORT.get(row or "", "").split())
            is_early_benchmark = other == "benchmarks" and row != other and not is_late
            if not is_allowed or is_early_benchmark:
                found.append(f"{path}:{line} imports {name}" + ", outside a function" * is_early_benchmark)
    return found


def module_cycles(tree: Tree) -> list[str]:
    """Cycles of imports that are executed, at the top of a module or in a function."""
    return cycles(
        {
            module_of(path): [name for _, name, _, is_for_types in tree.imports[path] if not is_for_types]
            for path in tree.paths()
        }
    )


def torch_outside_its_packages(tree: Tree) -> list[str]:
    """Files of packages without tensors that import torch or triton, or, when they are imported, a file that does."""

    @functools.cache
    def reaches_torch(path: str) -> bool:
        return any(
            name.split(".")[0] in ("torch", "triton")
            or (name in tree.path_of and tree.path_of[name] != path and reaches_torch(tree.path_of[name]))
            for _, name, is_late, is_for_types in tree.imports[path]
            if not is_late and not is_for_types
        )

    found = []
    for path in tree.paths():
        row = row_of(module_of(path)) or ""
        if is_in(row, WITH_TORCH):
            continue
        for line, name, _, _ in tree.imports[path]:
            if name.split(".")[0] in ("torch", "triton"):
                found.append(f"{path}:{line} imports {name}")
        if reaches_torch(path) and row not in REACHES_TORCH:
            found.append(f"{path} imports a module that imports torch")
    return found


def long_files(tree: Tree) -> list[str]:
    sizes = {path: len(tree.files[path].splitlines()) for path in tree.paths(PRODUCT)}
    return [f"{path} has {size} lines" for path, size in sizes.items() if size > MAX_LINES]


def small_files_of_one_importer(tree: Tree) -> list[str]:
    importers: dict[str, set[str]] = {}
    for path, imported in tree.imports.items():
        for _, name, _, _ in imported:
            importers.setdefault(name, set()).add(path)
    found = []
    for path in tree.paths(PRODUCT):
        folder, _, name = path.rpartition("/")
        size, num_importers = len(tree.files[path].splitlines()), len(importers.get(module_of(path), ()))
        if name not in ROW_FILES and folder not in ROW_FOLDERS and size < MIN_LINES and num_importers < 2:
            found.append(f"{path} has {size} lines and {num_importers} importer(s)")
    return found


def full_inits(tree: Tree) -> list[str]:
    return [path for path in tree.paths() if path.endswith("__init__.py") and tree.files[path] != ""]


def folders_that_are_no_packages(tree: Tree) -> list[str]:
    folders = dict.fromkeys(path.rpartition("/")[0] for path in tree.paths())
    return [folder for folder in folders if f"{folder}/__init__.py" not in tree.files]


def relative_and_star_imports(tree: Tree) -> list[str]:
    return [f"{path}:{line}" for path in tree.paths() for line in _relative_and_star_lines(tree.files[path])]


@functools.cache
def _relative_and_star_lines(text: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(_parse(text))
        if isinstance(node, ast.ImportFrom) and (node.level > 0 or any(alias.name == "*" for alias in node.names))
    ]


def waits_for_the_device(tree: Tree) -> list[str]:
    """Calls in models and kernels that wait, in files without an exception."""
    return [
        f"{path}:{line} .{name}()"
        for path in tree.paths(("models", "kernels"))
        if path not in SYNC_ALLOWED
        for line, name in _waits(tree.files[path])
    ]


@functools.cache
def _waits(text: str) -> list[tuple[int, str]]:
    return [
        (node.lineno, node.func.attr)
        for node in ast.walk(_parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SYNCS
    ]


def modules_without_docstring(tree: Tree) -> list[str]:
    paths = [path for path in tree.paths() if not path.endswith("__init__.py")]
    return [path for path in paths if not ast.get_docstring(tree.parsed(path))]


Rule = Callable[[Tree], list[str]]
# Rule, path and text of a planted file that breaks it, how its line begins
PLANTS: list[tuple[Rule, str, str, str]] = [
    (modules_without_a_row, "server/planted.py", "", "server/planted.py"),
    (forbidden_imports, "server/api/planted.py", "import engine.core.engine", "server/api/planted.py:1"),
    (forbidden_imports, "server/api/planted.py", "from engine.process import run", "server/api/planted.py:1"),
    (forbidden_imports, "kernels/planted.py", "import models.errors", "kernels/planted.py:1"),
    (forbidden_imports, "server/text/planted.py", "def f():\n    import server.http.app", "server/text/planted.py:2"),
    (forbidden_imports, "engine/core/planted.py", "import tests.support.fakes", "engine/core/planted.py:1"),
    (
        forbidden_imports,
        "engine/grammar/planted.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from engine.core.request import Request",
        "engine/grammar/planted.py:3",
    ),
    (
        forbidden_imports,
        "server/commands/bench/planted.py",
        "from benchmarks.report import write",
        "server/commands/bench/planted.py:1",
    ),
    (
        module_cycles,
        "engine/core/step.py",
        "def f():\n    import engine.core.request",
        "engine.core.request ↔ engine.core.step",
    ),
    (torch_outside_its_packages, "engine/core/planted.py", "def f():\n    import torch", "engine/core/planted.py:2"),
    (torch_outside_its_packages, "engine/core/planted.py", "import engine.device.sampler", "engine/core/planted.py"),
    (long_files, "models/planted.py", "\n" * 401, "models/planted.py"),
    (small_files_of_one_importer, "engine/core/planted.py", "X = 1", "engine/core/planted.py"),
    (full_inits, "engine/core/__init__.py", "X = 1", "engine/core/__init__.py"),
    (folders_that_are_no_packages, "engine/planted/loose.py", "", "engine/planted"),
    (relative_and_star_imports, "engine/core/planted.py", "from . import engine", "engine/core/planted.py:1"),
    (relative_and_star_imports, "engine/core/planted.py", "from os import *", "engine/core/planted.py:1"),
    (waits_for_the_device, "models/planted.py", "def f(x):\n    return x.item()", "models/planted.py:2"),
    (modules_without_docstring, "engine/core/planted.py", "X = 1", "engine/core/planted.py"),
]
RULES = list(dict.fromkeys(rule for rule, *_ in PLANTS))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_there_are_no(rule: Rule) -> None:
    assert rule(repository()) == []


@pytest.mark.parametrize(("rule", "path", "text", "line"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_offender_is_found(rule: Rule, path: str, text: str, line: str) -> None:
    (found,) = set(rule(with_planted(path, text))) - set(rule(repository()))
    assert found.startswith(line)


def test_the_table_has_no_cycle() -> None:
    assert cycles({row: others.split() for row, others in MAY_IMPORT.items()}) == []


def test_a_cycle_in_the_table_would_be_found() -> None:
    assert cycles({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": []}) == ["a ↔ b ↔ c"]


def test_every_row_of_the_table_exists() -> None:
    names = {row_of(module_of(path)) for path in repository().paths() if not path.endswith("__init__.py")}
    assert names == set(MAY_IMPORT)
    assert {other for others in MAY_IMPORT.values() for other in others.split()} <= set(MAY_IMPORT)


def test_server_may_import_one_package_of_engine() -> None:
    # server.local alone has the engine in its own process
    rows = [others.split() for row, others in MAY_IMPORT.items() if is_in(row, ["server"]) and row != "server.local"]
    below = {other for others in rows for other in others if is_in(other, ["engine", "models", "kernels"])}
    assert below == {"engine.interface"}


def test_every_exception_is_a_file() -> None:
    assert SYNC_ALLOWED.keys() <= set(repository().files)


@pytest.mark.parametrize("module", ["server.cli", "server.launcher.launcher", "server.http.worker", "engine.process"])
def test_process_starts_without_torch_and_transformers(module: str) -> None:
    heavy = ["torch", "transformers"] + (
        ["fastapi", "rich"] if module in ("server.cli", "server.launcher.launcher") else []
    )
    code = f"import sys, {module}; sys.exit(' '.join(m for m in {heavy!r} if m in sys.modules) or 0)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, f"{module} imports {result.stderr}"
