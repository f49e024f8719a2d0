"""Pairs over every transport that runs here: `posix` and `posix,tcp` puts are stores into shared
memory, `tcp` is UCX over loopback, `stream` and `stream-tls` are streams of our own,
and `auto` is shared memory here, with a stream beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transport.cuda_ranks import Rank
from tests.transport.process_faults import build
from tests.transport.transport_pair import Pair, start_remote
from tests.transport.transport_servant import Remote

KINDS = ("auto", "posix", "posix,tcp", "tcp", "stream", "stream-tls")


@pytest.fixture(params=KINDS, scope="module")
def tls(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(scope="module")
def pair(tls: str) -> Iterator[Pair]:
    pair = Pair(tls)
    yield pair
    pair.close()


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the libraries of `process_faults` are."""
    directory = tmp_path_factory.mktemp("native-stubs")
    build(directory)
    return directory


@pytest.fixture
def doomed(tls: str) -> Iterator[Remote]:
    """A servant that the test may kill."""
    remote = start_remote(tls)
    yield remote
    remote.exit()


@pytest.fixture
def source(libraries: Path, tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(libraries, tmp_path)
    rank.remote.call("fill", "pages", 0x11)
    yield rank
    rank.end()


@pytest.fixture
def target(libraries: Path, tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(libraries, tmp_path)
    yield rank
    rank.end()
