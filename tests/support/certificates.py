"""For sessions of tests: httpx reads the certificates of the world once, not for each client that trusts them.

To read them takes 30 ms of processor time, and thousands of requests of tests have a client of their own.
"""

import functools
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest


@contextmanager
def certificates_read_once() -> Iterator[None]:
    """Share the contexts of clients that ask for none of their own, as long as the environment names the same files."""
    make = httpx.create_ssl_context

    @functools.cache
    def of_the_world(files: tuple[str | None, ...], trust_env: bool) -> ssl.SSLContext:
        return make(trust_env=trust_env)

    def shared(
        verify: ssl.SSLContext | str | bool = True,
        cert: str | tuple[str, str] | tuple[str, str, str] | None = None,
        trust_env: bool = True,
    ) -> ssl.SSLContext:
        if verify is True and cert is None:
            return of_the_world(tuple(map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR"))), trust_env)
        return make(verify=verify, cert=cert, trust_env=trust_env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", shared)
        yield
