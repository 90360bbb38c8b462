"""`quire usage`: prints GET /v1/usage of a server as CSV (RFC 4180) or JSON. Imports httpx and msgspec when it runs.

Exit codes: 0 printed, 2 wrong usage or a key without the role admin, 3 no server.
"""

import argparse
import csv
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from server.commands.target_flags import DEFAULT_URL, add_server_flags
from server.config.value_types import AnyParser

if TYPE_CHECKING:
    from server.commands.server_target import ServerEndpoint

_TIMEOUT_S = 10.0
_EXAMPLES = """\
examples:
  quire usage > usage.csv
  quire usage --url http://gpu-host:8000 --json
"""


def add_usage(commands: "argparse._SubParsersAction[AnyParser]") -> None:
    """Add `usage`."""
    parser = commands.add_parser(
        "usage",
        help="print what each API key has used",
        description="Requests, tokens and device time by the name of the API key, as CSV.",
        usage="quire usage [--url URL] [flags]",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("--json", action="store_true", help="print the server's JSON instead")
    add_server_flags(parser, url_help=f"the server ({DEFAULT_URL})")


def write_csv(start_time: int, rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> None:
    """Write the ledger to standard output, times with three digits."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["since", *fields])
    for row in rows:
        values = (row[name] for name in fields)
        rounded = [f"{value:.3f}" if isinstance(value, float) else value for value in values]
        writer.writerow([start_time, *rounded])


def _run(arguments: argparse.Namespace) -> int:
    import msgspec

    from engine.interface.control import KeyUsage
    from server.commands.server_target import ToolError, make_endpoint

    endpoint = make_endpoint(arguments.url or DEFAULT_URL, arguments.api_key, os.environ)
    body = _fetch(endpoint)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        start_time = msgspec.json.decode(fields["start_time"], type=int)
        rows = msgspec.json.decode(fields["data"], type=list[KeyUsage])
    except (msgspec.MsgspecError, KeyError) as error:
        raise ToolError(f"{endpoint.url}/v1/usage is not Quire's.") from error
    if arguments.json:
        print(body.decode())
    else:
        write_csv(start_time, [msgspec.structs.asdict(row) for row in rows], KeyUsage.__struct_fields__)
    return 0


def _fetch(endpoint: "ServerEndpoint") -> bytes:
    """Return the server's answer. Raises ToolError."""
    import httpx

    from server.commands.server_target import ToolError, check_key, error_message, make_client, transport_message

    try:
        with make_client(endpoint, timeout_s=_TIMEOUT_S) as client:
            response = client.get("/v1/usage")
    except httpx.HTTPError as error:
        raise ToolError(transport_message(endpoint, error)) from error
    if response.status_code == 403:
        raise ToolError(f"{endpoint.url}: {error_message(403, response.content)}", exit_code=2)
    check_key(endpoint, response)
    if response.status_code != 200:
        raise ToolError(f"{endpoint.url} shows no usage: {error_message(response.status_code, response.content)}")
    return response.content
