"""Writes the generated pages of docs/reference: make reference-pages; with --check it only compares.

Generated: the tables of flags.md (tests/configuration_page.py), metrics.md (METRICS), errors.md (the error classes),
limits.md (LIMITS and ROUTE_COSTS), key-file.md (FIELDS) and the sampling parameters of api.md
(server/api/sampling_fields.py) between their markers, models-by-name.md with models/known_models.json
(tests/known_models.py), the tables of attacks.md (the newest results of make chaos and make soak), and all of
api-rules.md (the comments `# rule: …` of the tests) and of promises.md (tests/promises_page.py).
"""

import dataclasses
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from engine.interface.errors import RequestError, ServiceError, StartupError
from engine.interface.metrics import METRICS, Metric
from engine.interface.protocol import SamplingParams
from server.api.error_replies import anthropic_body, error_body, error_reply, error_status
from server.api.limits import LIMITS, LOOP_MS, ROUTE_COSTS, WORKER_MIB
from server.api.messages.schema import MessagesBody
from server.api.responses.schema import ResponsesBody
from server.api.sampling_fields import SamplingField, sampling_fields
from server.api.schemas import ChatBody, CompletionBody
from server.config.key_limits import FIELDS
from server.errors import ClientGone, DeadlineExceeded, HttpError, MethodNotAllowed
from tests import configuration_page, known_models, promises_page
from tests.chaos.__main__ import ACTS, Row
from tests.chaos.__main__ import table as attacks_table
from tests.soak.__main__ import Kind, process_table, request_table
from tests.soak.growth import Growth
from tests.support.costly_bodies import max_body_bytes

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"

_METRIC_HEAD = ["| name | kind | unit | also as | meaning |", "|---|---|---|---|---|"]
_GROUPS = {  # the first pattern that a name matches decides; what matches none belongs to the daemon
    "keys": r"key_",
    "request": r"time_to_first|inter_token|e2e_|request_",
    "outcome": r"requests_|http_",
    "engine": r"prompt_|generation_|num_|preempted_|spec_|iteration_|step_",
    "memory": r"kv_|prefix_|gpu_",
    "daemon": "",
}
_UNITS = {  # the first pattern that is found in a name decides
    r"bytes_per_second": "bytes/s",
    r"_seconds": "s",
    r"_bytes": "bytes",
    r"_ratio": "0 to 1",
    r"tokens|prefix_cache_(queries|hits)": "tokens",
    r"event_batches": "batches",
    r"blocks|evictions": "blocks",
    r"_pages": "pages",
    r"_states": "states",
    r"restarts": "restarts",
    r"takeovers": "takeovers",
    r"_fds": "files",
    r"connections": "connections",
    r"^(ready|engine_up|kv_disk_paused)$": "0 or 1",
    r"^kv_disk_errors": "calls",
    r"": "requests",
}

_ERROR_HEAD = ["| status | `code` | `type` | Anthropic's `type` | when | headers |", "|---|---|---|---|---|---|"]
_INTERNAL = "A fault of the server; the message has the request id, the log has the traceback."
_NO_REPLY = (RequestError, HttpError, StartupError, ClientGone)  # base classes, and errors that no client receives

_SCHEMAS = {"chat": ChatBody, "completions": CompletionBody, "responses": ResponsesBody, "messages": MessagesBody}

_SECTIONS = ("Endpoints", "Fields", "Streams", "Errors", "Limits", "Security", "Tools and reasoning")
_RULES_HEAD = """\
# Rules of the API

Every rule of the [API](api.md), with the tests that fail if it is broken.
`make reference-pages` collects this list from the comments `# rule: SECTION: RULE` above the tests.
"""


def metrics_page() -> str:
    """Return what docs/reference/metrics.md should be."""
    text = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    groups: dict[str, list[Metric]] = {name: [] for name in _GROUPS}
    for metric in METRICS.values():
        groups[next(group for group, pattern in _GROUPS.items() if re.match(pattern, metric.name))].append(metric)
    for name, metrics in groups.items():
        text = _between(text, name, [*_METRIC_HEAD, *map(_metric_row, metrics)])
    text = _between(text, "labels", list(_label_rows()))
    return _between(text, "buckets", list(_bucket_rows()))


def _metric_row(metric: Metric) -> str:
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    meaning = metric.help.removesuffix(".")
    alias_labels = f"{{{','.join(metric.alias_label)}}}" if metric.alias_label else ""
    alias = f"`{metric.alias}{alias_labels}`" if metric.alias else ""
    if metric.old_name:
        alias, meaning = f"`quire_{metric.old_name}`", f"{meaning}; the old name is deprecated"
    unit = next(unit for pattern, unit in _UNITS.items() if re.search(pattern, metric.name))
    cells = (f"`quire_{metric.name}{labels}`", metric.kind, unit, alias, meaning)
    return _row(cells)


def _label_rows() -> Iterator[str]:
    yield from ("| metric | label | values |", "|---|---|---|")
    for metric in METRICS.values():
        if metric.label_values:
            values = ", ".join(f"`{value}`" for value in metric.label_values)
            yield _row((f"`quire_{metric.name}`", f"`{metric.labels[0]}`", values))


def _bucket_rows() -> Iterator[str]:
    yield from ("| metrics | upper bounds |", "|---|---|")
    by_bounds: dict[tuple[float, ...], list[str]] = defaultdict(list)
    for metric in METRICS.values():
        if metric.kind == "histogram":
            by_bounds[metric.buckets].append(f"`quire_{metric.name}`")
    for bounds, names in by_bounds.items():
        yield _row((", ".join(names), " · ".join(f"{bound:,.10g}" for bound in bounds)))


def errors_page() -> str:
    """Return what docs/reference/errors.md should be."""
    errors = sorted(map(_example, _error_classes()), key=lambda error: (error_status(error), error.code))
    text = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    return _between(text, "errors", [*_ERROR_HEAD, *map(_error_row, errors)])


def _error_classes() -> list[type[ServiceError]]:
    """Return every error that a client can receive: those of the two modules that define the tree."""
    modules = (ServiceError.__module__, HttpError.__module__)
    found = [ServiceError]
    for cls in found:  # grows while it is walked
        found += (child for child in cls.__subclasses__() if child.__module__ in modules)
    return [cls for cls in found if cls not in _NO_REPLY]


def _example(cls: type[ServiceError]) -> ServiceError:
    if cls is MethodNotAllowed:
        return MethodNotAllowed("", allow="GET")
    return DeadlineExceeded(1.0) if cls is DeadlineExceeded else cls("")


def _error_row(error: ServiceError) -> str:
    reply = error_reply(error, request_id="")
    kind = re.search(rb'"type":"(\w+)"', error_body(error, request_id=""))
    assert kind is not None
    when = _INTERNAL if type(error) is ServiceError else _first_paragraph(type(error))
    headers = ", ".join(f"`{name}`" for name in sorted(reply.headers))
    anthropic = anthropic_body(error, request_id="").error.type
    return _row((str(reply.status), f"`{error.code}`", f"`{kind[1].decode()}`", f"`{anthropic}`", when, headers))


def _first_paragraph(cls: type[ServiceError]) -> str:
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def api_page() -> str:
    """Return what docs/reference/api.md should be."""
    text = (REFERENCE / "api.md").read_text(encoding="utf-8")
    return _between(text, "sampling parameters", list(_sampling_rows()))


def _sampling_rows() -> Iterator[str]:
    yield from ("| field | APIs | | when absent |", "|---|---|---|---|")
    rows = []
    for name, field in sampling_fields(ChatBody).items():
        apis = [api for api, schema in _SCHEMAS.items() if name in schema.model_fields]
        places = "all" if len(apis) == len(_SCHEMAS) else ", ".join(apis)
        rows.append((name, (places, field.documentation, _when_absent(name, field))))
    for cells, names in groupby(rows, key=lambda row: row[1]):
        yield _row((", ".join(f"`{name}`" for name, _ in names), *cells))


def _when_absent(name: str, field: SamplingField) -> str:
    if name == "seed":
        return "drawn"
    default = {f.name: f.default for f in msgspec.structs.fields(SamplingParams)}[name]
    off = "none" if default is msgspec.NODEFAULT else f"{default:g}"
    return f"`generation_config.json`, else {off}" if field.default == "model" else off


def limits_page() -> str:
    """Return what docs/reference/limits.md should be."""
    text = (REFERENCE / "limits.md").read_text(encoding="utf-8")
    rows = [(f"`{row.name}`", f"{row.default:,}", row.metadata["meaning"]) for row in dataclasses.fields(LIMITS)]
    text = _between(text, "limits", ["| limit | value | meaning |", "|---|---|---|", *map(_row, rows)])
    return _between(text, "routes", list(_cost_rows()))


def key_file_page() -> str:
    """Return what docs/reference/key-file.md should be."""
    text = (REFERENCE / "key-file.md").read_text(encoding="utf-8")
    rows = []
    for field in FIELDS.values():
        kind = "whole number" if field.is_whole else "number"
        rows.append((f"`{field.name}`", f"{kind}, {field.low:,.15g} to {field.high:,.15g}", field.meaning))
    return _between(text, "fields", ["| field | value | meaning |", "|---|---|---|", *map(_row, rows)])


def _cost_rows() -> Iterator[str]:
    names = ("route", "bytes", "objects and lists", "strings", "commas", "tokens", "log-probabilities", "also")
    yield from (_row((*names, "event loop", "memory")), "|---" * (len(names) + 2) + "|")
    body = [max_body_bytes(), LIMITS.json_containers, LIMITS.json_strings, LIMITS.json_commas]
    for path, cost in ROUTE_COSTS.items():
        tokens = "the context" if cost.tokens == "context" else f"{getattr(LIMITS, cost.tokens):,}"
        entries = f"{LIMITS.answer_entries:,}" if cost.has_entries else "none"
        also = [name for name, is_done in (("template", cost.renders), ("grammar", cost.compiles)) if is_done]
        common = (f"{number:,}" for number in body)
        last = (", ".join(also) or "none", f"{LOOP_MS} ms", f"{WORKER_MIB:,} MiB")
        yield _row((f"`{path}`", *common, tokens, entries, *last))


def rules_page() -> str:
    """Return what docs/reference/api-rules.md should be."""
    sections: dict[str, dict[str, list[str]]] = {name: {} for name in _SECTIONS}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for rule, test in rules_of(path.read_text(encoding="utf-8")):
            section, _, sentence = rule.partition(": ")
            sections[section].setdefault(sentence, []).append(f"`{path.relative_to(ROOT)}::{test}`")
    lines = [_RULES_HEAD]
    for section, rules in sections.items():
        names = sorted(rules, key=lambda rule: rule.strip("`/").lower())
        rows = [_row((rule, "<br>".join(rules[rule]))) for rule in names]
        lines += [f"## {section}", "", "| rule | tests |", "|---|---|", *rows, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def rules_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield each rule of a test file with the name of the test below it."""
    waiting: list[str] = []
    is_open = False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("# rule: "):
            waiting.append(line.removeprefix("# rule: "))
            is_open = True
        elif is_open and line.startswith("#     "):
            waiting[-1] += " " + line.removeprefix("#").strip()
        else:
            is_open = False
            if test := re.match(r"(?:async )?def (test_\w+)\(", line):
                yield from ((rule, test[1]) for rule in waiting)
                waiting = []
    if waiting:
        raise ValueError(f"there is no test below the rule {waiting[0]!r}")


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _between(text: str, name: str, rows: list[str]) -> str:
    """Put rows between the markers of a table."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(f"{start}\n")
    _, found, after = rest.partition(f"{end}\n")
    if not found:
        raise ValueError(f"the markers {start} and {end} are missing")
    return f"{before}{start}\n" + "".join(f"{row}\n" for row in rows) + f"{end}\n{after}"


def attacks_page() -> str:
    """Return what docs/reference/attacks.md should be."""
    text = (REFERENCE / "attacks.md").read_text(encoding="utf-8")
    does = [(f"`{name}`", str(act.__doc__).removesuffix(".")) for name, act in ACTS.items()]
    text = _between(text, "acts", ["| act | what it does |", "|---|---|", *map(_row, does)])
    chaos = _newest("chaos")
    text = _between(text, "chaos", [*_run_rows(chaos), "", attacks_table([Row(**row) for row in chaos["acts"]])])
    soak = _newest("soak")
    kinds = {name: Kind(**kind) for name, kind in soak["requests"].items()}
    text = _between(text, "load", [*_run_rows(soak), "", request_table(kinds)])
    return _between(text, "growth", [process_table([Growth(**growth) for growth in soak["processes"]])])


def _newest(name: str) -> dict[str, Any]:
    path = max((ROOT / "benchmarks/results").glob(f"{name}-cpu-*.json"))
    return {"file": path.name, **json.loads(path.read_text(encoding="utf-8"))}


def _run_rows(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield when, where and for how long it ran."""
    machine = report["machine"]
    yield f"- {report['date']}, {machine['cpus']} CPU cores, {machine['platform']}, Python {machine['python']}"
    if "hours" in report:
        yield f"- {report['hours']:.2f} hours at {report['rate_per_s']:g} requests a second"
        yield f"- warm-up {report['warm_up_s']} s"
    yield f"- seed {report['seed']}, server flags `{' '.join(report['server_flags'])}`"
    yield f"- [results/{report['file']}](../../benchmarks/results/{report['file']})"


def known_page() -> str:
    """Return what docs/reference/models-by-name.md should be."""
    text = (REFERENCE / "models-by-name.md").read_text(encoding="utf-8")
    names = ("model", "parameters", "bf16", "fp8", "int4", "KV", "note", "command")
    text = _between(text, "served", [_row(names), "|---|---:|---:|---:|---:|---:|---|---|", *known_models.known_rows()])
    names = ("model", "why", "the nearest that is served")
    return _between(text, "unserved", [_row(names), "|---|---|---|", *known_models.unserved_rows()])


PAGES: dict[Path, Callable[[], str]] = {
    configuration_page.PAGE: configuration_page.page,
    REFERENCE / "metrics.md": metrics_page,
    REFERENCE / "errors.md": errors_page,
    REFERENCE / "api.md": api_page,
    REFERENCE / "limits.md": limits_page,
    REFERENCE / "models-by-name.md": known_page,
    ROOT / "models" / "known_models.json": known_models.known_json,
    REFERENCE / "key-file.md": key_file_page,
    REFERENCE / "api-rules.md": rules_page,
    REFERENCE / "attacks.md": attacks_page,
    promises_page.PATH: promises_page.page,
}


def main() -> int:
    """Write the pages; with --check return 1 if one is stale."""
    stale = [path for path, page in PAGES.items() if not path.exists() or path.read_text(encoding="utf-8") != page()]
    if sys.argv[1:] == ["--check"]:
        for path in stale:
            print(f"{path} is stale: run make reference-pages", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(PAGES[path](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
