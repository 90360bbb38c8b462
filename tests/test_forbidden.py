"""What must not be anywhere in the daemon: pickles, code made of text, a model folder's own code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [path for folder in ("server", "engine", "models", "kernels") for path in (ROOT / folder).rglob("*.py")]
MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
FUNCTIONS = {"eval", "exec"}
# A wall clock jumps, so durations and deadlines are measured with time.monotonic. Who may ask what time it is:
CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
TELLERS = {
    "server/http/app.py": "when the models were made",
    "server/api/chat/request.py": "created",
    "server/api/completions/request.py": "created",
    "server/api/responses/writer.py": "completed_at",
    "server/text/chat_template.py": "strftime_now of templates",
    "engine/kv_publisher.py": "when a batch of events was made",
    "server/http/tracing.py": "when a span began, beside monotonic durations",
    "server/commands/batch/send.py": "a Retry-After that is a date",
    "server/commands/top/sampling.py": "when a line of --json was taken",
}


def relative(path):
    return path.relative_to(ROOT).as_posix()


def faults(node):
    """Say what is wrong with one node of a syntax tree."""
    if isinstance(node, ast.Import):
        yield from MODULES & {alias.name.split(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        yield from MODULES & {(node.module or "").split(".")[0]}
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield from FUNCTIONS & {node.func.id}
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
        is_safe = any(ast.unparse(keyword) == "weights_only=True" for keyword in node.keywords)
        if ast.unparse(node.func) == "torch.load" and not is_safe:
            yield "torch.load without weights_only=True"
    elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
        yield "trust_remote_code"


@pytest.mark.parametrize(
    "source", ["import pickle", "from dill import loads", "eval('1')", "torch.load(f)", "f(trust_remote_code=True)"]
)
def test_a_fault_is_found(source):
    assert [fault for node in ast.walk(ast.parse(source)) for fault in faults(node)]


# rule: Security: No pickles, no code made of text, no code of a model folder
# rule: Tools and reasoning: Nothing of a model's output is evaluated
def test_nothing_is_unpickled_or_evaluated():
    found = [
        f"{relative(path)}: {fault}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for fault in faults(node)
    ]
    assert found == []


def test_no_duration_is_measured_with_a_clock_that_jumps():
    found = [
        f"{relative(path)}:{node.lineno} {ast.unparse(node.func)}"
        for path in SOURCES
        if relative(path) not in TELLERS
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CLOCKS
    ]
    assert found == []
