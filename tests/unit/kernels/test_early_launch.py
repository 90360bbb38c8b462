"""Kernels that begin before the kernel before them has ended (programmatic dependent launch): what they do until then.

A kernel may signal the next one, read what earlier kernels wrote, and write, only behind gdc_wait(). Signalled sooner,
the next kernel could begin, and read, while the kernel before this one still writes. A wait covers all earlier kernels
only if each of them has waited, so no program may end without.

wait_for_rows does both. It signals first where a product follows, which reads weights alone before its own wait.
"""

import ast
import re

from tests.support.daemon import ROOT

KERNELS = ROOT / "kernels"
# Pointers that may be read before the wait. Parameters, and tables that are filled when the model is loaded
CONSTANTS = re.compile(
    r"^(weight|steps|w|scales|factors|zeros|bias|lut|table|codes|absmax|a_log|dt_bias|decay|skip)(_\w+)?$"
)
# Written by the first kernels of a step. These have ended when the kernel before attention signals, behind its own wait
STEP_INPUTS = {"seq_lens", "query_start", "pieces", "req_index", "pages", "writes"}
# Recurrent states: last written by the same layer a step ago, or in front of the step, when a checkpoint is copied. At
# least two kernels are between, so the one that signals has waited for the end of all of it (kernels/states_triton.py)
STATES = {"state"}
# (kernel, pointer): written by the kernel before the last one, which that one has waited for before it signalled
EARLIER = {("_sum_kernel", "experts"), ("_sum_kernel", "weights")}  # the routing, before the first product
_WRITES = ("store", "atomic_add", "atomic_xchg", "atomic_max", "atomic_min", "atomic_cas", "store_split")


def calls(tree: ast.AST) -> list[tuple[int, str, ast.Call]]:
    """Return (line, last name, call) in order of lines."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name == "grid_dependency":  # Gluon's
                name = "gdc_wait" if "griddepcontrol.wait" in ast.unparse(node) else "gdc_launch_dependents"
            found.append((node.lineno, name, node))
    return sorted(found, key=lambda entry: entry[0])


def unsafe_reads(call: ast.Call, kernel: str) -> list[str]:
    """Return the pointers of a kernel's load that an earlier kernel may still write."""
    names = {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)}
    pointers = {name: re.sub(r"_(ptrs?|desc)$", "", name) for name in names if re.search(r"_(ptrs?|desc)$", name)}
    return sorted(
        name
        for name, bare in pointers.items()
        if not CONSTANTS.match(bare) and bare not in STEP_INPUTS | STATES and (kernel, bare) not in EARLIER
    )


def problems(source: str, name: str) -> list[str]:
    """Return the breaches of the rule in a file."""
    found, has_wait = [], False
    for function in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]:
        made = calls(function)
        if function.name == "wait_for_rows":
            continue
        waits = [line for line, called, _ in made if called in ("gdc_wait", "wait_for_rows")]
        signals = [line for line, called, _ in made if called in ("gdc_launch_dependents", "wait_for_rows")]
        has_wait |= bool(waits)
        where = f"{name}:{function.name}"
        if len(waits) != len(signals) or len(waits) > 1:
            found.append(f"{where}: {len(waits)} waits, {len(signals)} signals")
        elif waits and signals[0] < waits[0]:
            found.append(f"{where}: signals before it waits")
        ends = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Return)]
        if waits and min(ends, default=waits[0]) < waits[0]:
            found.append(f"{where}: may end before it waits")
        for line, called, call in made if waits else ():
            if line < waits[0] and called in _WRITES:
                found.append(f"{where}: {called} in line {line}, before it waits")
            if line < waits[0] and called == "load" and (read := unsafe_reads(call, function.name)):
                found.append(f"{where}: reads {', '.join(read)} in line {line}, before it waits")
    if "launch_pdl=" in source and not has_wait:
        found.append(f"{name}: launches early, and no kernel waits")
    return found


def test_kernels_wait_before_they_signal_read_or_write() -> None:
    files = sorted(KERNELS.rglob("*.py"))
    assert not [problem for path in files for problem in problems(path.read_text(), str(path.relative_to(ROOT)))]


def test_the_rule_finds_its_breaches() -> None:
    wait, signal = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"
    for body, word in (
        ([signal, wait], "signals before"),
        ([wait], "0 signals"),
        ([signal], "0 waits"),
        (["tl.store(out_ptr, 1)", wait, signal], "store"),
        (["x = tl.load(x_ptr + columns)", wait, signal], "reads x_ptr"),
        (["if tl.program_id(0) > 0:", "    return", wait, signal], "may end"),
    ):
        source = "def kernel(x_ptr, out_ptr):\n" + "".join(f"    {line}\n" for line in body)
        (problem,) = problems(source, "kernel.py")
        assert word in problem
    assert not problems(
        f"def kernel(weight_ptr):\n    w = tl.load(weight_ptr)\n    {wait}\n    {signal}\n", "kernel.py"
    )


def test_rounding_alone_signals_first() -> None:
    """The kernels of these files round the input of a product, which is launched next."""
    files = {str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.py") if "wait_for_rows" in path.read_text()}
    assert files == {"dispatch.py", "linear/triton_fp8.py", "linear/triton_rounded.py", "linear/triton_scaled8.py"}
