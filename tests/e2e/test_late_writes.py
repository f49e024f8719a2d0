"""What a frozen writer still had to write lands where its pages wait for it, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from common.protocol.codec import decode_layout
from common.protocol.peer import Abort, Quiesced, TransferDone
from tests.e2e.fleet import CHECKPOINT, Fleet, Node
from tests.e2e.raw_decode import RawDecode

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

LAYER_COUNT, PAGE_SIZE = 3, 16
LONG_PROMPT = [20 + index % 900 for index in range(900)]
SHORT_PROMPT = LONG_PROMPT[100:140]
BEGUN_PAGE = 8  # one of the first that a long prompt fills
UNTOUCHED, FREED = 0xA5, 0x5A


@pytest.fixture(scope="module")
def prefill(fleet: Fleet) -> Iterator[Node]:
    """Computes a page at a time, and puts it while it computes the next."""
    flags = ("--dtype", "float32", "--disable-radix-cache")
    yield fleet.prefill("--chunked-prefill-size", str(PAGE_SIZE), *flags)


@pytest.mark.parametrize("tls", ["posix", "stream"])
def test_late_bytes_of_a_frozen_writer_land_in_its_pages_and_none_after_its_last_word(
    prefill: Node, tls: str
) -> None:
    prefill.wait_ready()
    with RawDecode(prefill, CHECKPOINT, LAYER_COUNT, PAGE_SIZE, tls) as raw:
        (pages,) = raw.pages
        pages[:] = UNTOUCHED
        source = decode_layout(raw.welcome.layout)
        request = raw.reserve(1, source, LONG_PROMPT)
        reserved = request.pages[0][1]
        raw.say(request)
        raw.beat_until("first pages", lambda: bool(np.any(pages[BEGUN_PAGE] != UNTOUCHED)))
        with prefill.frozen("common.worker"):
            # Nobody may have them yet: this is what quarantine is for.
            missing = [page for page in reserved if np.all(pages[page] == UNTOUCHED)]
            assert missing, "frozen in the midst of it"
        raw.beat_until("late bytes", lambda: bool(np.any(pages[missing] != UNTOUCHED)))
        raw.say(Abort(1, raw.incarnation, raw.welcome.incarnation, "a test"))
        raw.wait_for(Quiesced)
        others = np.delete(pages, reserved, axis=0)
        assert np.all(others == UNTOUCHED)

        pages[:] = FREED
        brief = raw.reserve(2, source, SHORT_PROMPT)
        raw.say(brief)
        raw.wait_for(TransferDone)
        used = brief.pages[0][1]
        assert np.all(np.delete(pages, used, axis=0) == FREED)
