"""Prompts whose beginning the decode side has, between real worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import Role, TransferMode, Verify
from common.protocol.digests import Digest, Digested
from tests.engine.tiny_checkpoints import Reference, random_prompt
from tests.worker.test_staged_processes import StagedPair, start
from tests.worker.test_worker_processes import DECODE_PAGES, GREEDY, PREFILL_PAGES
from tests.worker.worker_processes import WorkerProcesses

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ITEM_NBYTES = 12288 // 8  # all layers' keys and values of one token of this checkpoint
# Whole pages of 8 at the target, and the middle of a page of 16 at the source.
PREFIX = 24


@pytest.fixture(
    scope="module",
    params=[
        ("shm", TransferMode.DIRECT),
        ("ucx-tcp", TransferMode.DIRECT),
        ("shm", TransferMode.STAGED),
        pytest.param(("ucx-tcp", TransferMode.STAGED), marks=pytest.mark.soak),
        pytest.param(("stream", TransferMode.DIRECT), marks=pytest.mark.soak),
        pytest.param(("stream", TransferMode.STAGED), marks=pytest.mark.soak),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def pair(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[StagedPair]:
    """Of pages of 16 to pages of 8, connected."""
    transport, transfer_mode = request.param
    changes = {"transport": transport}
    for pair in start(checkpoint, {"page_size": 16, **changes}, {"page_size": 8, **changes}):
        pair.transfer_mode = transfer_mode
        pair.connect()
        yield pair


def bring(pair: StagedPair, prompt: list[int], token_start: int) -> tuple[list[int], int, int]:
    """A prompt's output, and the bytes and the Sends that brought its cache."""
    if pair.transfer_mode is TransferMode.STAGED:
        pair.expect_transfer(pair.next_id, len(prompt), token_start)
    tokens, settled = pair.transfer(prompt, GREEDY, chunk=16, token_start=token_start)
    assert {message.error for message in settled} == {""}
    return tokens, sum(message.nbytes for message in settled), len(settled)


def digest(
    server: WorkerProcesses, peer: WorkerProcesses, tokens: range, pages: tuple[int, list[int]]
) -> bytes:
    """What a server's rank says of the cache of some tokens."""
    is_source = server.config.role is Role.PREFILL
    job = Digest(
        transfer_id=5,
        layout=peer.ready[0].layout,
        is_source=is_source,
        token_count=tokens.stop,
        pages=[pages],
        verify=Verify.FULL,
        token_start=tokens.start,
    )
    server.send(job)
    (found,) = server.expect(Digested).digests
    return found


@pytest.mark.parametrize(
    ("length", "send_count"),
    [(PREFIX, 1), (PREFIX + 1, 1), (45, 2)],  # in chunks of 16, of which the first is not sent
)
def test_a_prompt_whose_beginning_is_there_goes_on_as_transformers_would(
    pair: StagedPair, oracle: Reference, length: int, send_count: int
) -> None:
    """Only the rest moves; of a prompt of which all is there, nothing but the last word."""
    beginning = random_prompt(PREFIX, 1)
    bring(pair, [*beginning, *random_prompt(20, 2)], 0)
    prompt = [*beginning, *random_prompt(length - PREFIX, 3)]
    tokens, nbytes, sends = bring(pair, prompt, PREFIX)
    assert tokens == oracle.greedy(prompt, 24)
    assert (nbytes, sends) == ((length - PREFIX) * ITEM_NBYTES, send_count)


def test_pages_of_a_beginning_are_not_written_whatever_lies_in_them(
    pair: StagedPair, oracle: Reference
) -> None:
    """Those of another prompt: the output is wrong, and the digests of both sides agree on the rest
    alone."""
    bring(pair, random_prompt(45, 4), 0)
    kept = (0, DECODE_PAGES[: PREFIX // 8])
    before = digest(pair.decode, pair.prefill, range(PREFIX), kept)
    prompt = random_prompt(45, 5)
    tokens, nbytes, _ = bring(pair, prompt, PREFIX)
    assert nbytes == (45 - PREFIX) * ITEM_NBYTES
    assert tokens != oracle.greedy(prompt, 24)
    assert digest(pair.decode, pair.prefill, range(PREFIX), kept) == before
    for first, is_equal in ((PREFIX, True), (0, False)):
        tokens_of = range(first, 45)
        pages = (first // 8, DECODE_PAGES[first // 8 :])
        sent = digest(pair.prefill, pair.decode, tokens_of, (0, PREFILL_PAGES))
        assert (digest(pair.decode, pair.prefill, tokens_of, pages) == sent) == is_equal
