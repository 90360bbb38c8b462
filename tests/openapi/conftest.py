"""Options of make test-openapi; schemathesis runs in an environment without Quire."""

import pytest

from tests.support.daemon import ROOT


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server-python", default=str(ROOT / ".venv/bin/python"), help="interpreter that has Quire")
    parser.addoption("--examples", default="10", help="requests that schemathesis draws for each operation")
