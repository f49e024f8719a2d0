"""Pairs over real UCX: `posix,tcp` puts are stores into shared memory, `tcp` is loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transport.transport_pair import Pair, start_remote
from tests.transport.transport_servant import Remote


@pytest.fixture(params=["posix,tcp", "tcp"], scope="module")
def tls(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(scope="module")
def pair(tls: str) -> Iterator[Pair]:
    pair = Pair(tls)
    yield pair
    pair.close()


@pytest.fixture
def doomed(tls: str) -> Iterator[Remote]:
    """A servant that the test may kill."""
    remote = start_remote(tls)
    yield remote
    remote.exit()
