"""The rows of a long table that make test runs."""

import ast
import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import covering, pytest_collection_modifyitems

ROOT = Path(__file__).parents[2]
GPU_TESTS = ROOT / "tests" / "gpu"
GPU_MARK = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.gpu\b", re.MULTILINE)


def test_all_tests_in_the_folder_that_make_test_does_not_collect_need_a_gpu():
    files = [path for pattern in ("test_*.py", "*_test.py") for path in GPU_TESTS.rglob(pattern)]
    assert files
    assert [path.name for path in files if not GPU_MARK.search(path.read_text())] == []


def test_what_gpu_tests_import_of_this_repository_exists():
    """Also what they import in functions. Read from the sources: nothing else here imports these tests."""
    imports = [
        (path.name, node.module, alias.name)
        for path in GPU_TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None and is_folder(node.module.split(".")[0])
        for alias in node.names
    ]
    assert len(imports) > 100
    assert [each for each in imports if not has_name(*each[1:])] == []
    assert not has_name("tests.conftest", "uncovering")
    assert not has_name("tests.gone", "covering")


def is_folder(module: str) -> bool:
    return (ROOT / module.replace(".", "/")).is_dir()


def has_name(module: str, name: str) -> bool:
    return name in names_in(module) or is_folder(f"{module}.{name}") or bool(names_in(f"{module}.{name}"))


@functools.cache
def names_in(module: str) -> set[str]:
    """Return what a module of this repository defines or imports; nothing if there is no such file."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


@pytest.mark.full
def test_the_tests_for_gpus_are_collected_without_one():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", str(GPU_TESTS)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-4000:]


def test_each_value_is_in_a_row_and_few_rows_are_kept():
    rows = [list(row) for row in itertools.product("ab", "abcde", "abc")]
    kept = covering(rows)
    assert len(kept) == 5
    assert [set(column) for column in zip(*(rows[place] for place in kept), strict=True)] == [
        set("ab"), set("abcde"), set("abc"),
    ]  # fmt: skip


def test_a_table_of_one_column_is_kept_whole_and_an_empty_one_is_empty():
    assert covering([["a"], ["b"], ["c"], ["d"]]) == {0, 1, 2, 3}
    assert covering([]) == set()


class Row:
    """A test of a table, as pytest collects it."""

    def __init__(self, *values: str, is_full: bool = False) -> None:
        self.path, self.originalname, self.callspec = Path("test_a.py"), "test_a", SimpleNamespace(_idlist=values)
        self.marks = {"table": pytest.mark.table.mark} | ({"full": pytest.mark.full.mark} if is_full else {})

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = getattr(pytest.mark, name).mark


def test_the_rows_of_a_table_that_make_test_runs_are_chosen_from_those_that_are_not_full_already():
    rows = [Row("a", "1", is_full=True), Row("a", "2", is_full=True), Row("b", "1"), Row("b", "2"), Row("b", "1")]
    pytest_collection_modifyitems(rows)
    assert ["full" in row.marks for row in rows] == [True, True, False, False, True]
