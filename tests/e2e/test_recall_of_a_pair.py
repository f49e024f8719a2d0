"""The demo checkpoint answers through the pair, and stops to once a page of its cache is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.config import Role
from common.protocol.worker import (
    ConnectPeer,
    NewSequence,
    OpenPeer,
    PageGrant,
    PeerConnected,
    PeerOpened,
    PrefillChunk,
    SendSettled,
)
from common.request import SamplingParams
from demo.facts import Question, is_right, make_question
from demo.score import PAGE_TOKEN_COUNT, pages_of_fact
from tests.e2e.fleet import CHECKPOINT, Body, Fleet
from tests.worker.whole_send import WholeSend
from tests.worker.worker_processes import WorkerProcesses

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.soak]

QUESTION_COUNT = 32
RIGHT_SHARE_MIN = 0.95
FACT_COUNTS = (4, 8, 16, 24, 32, 40)
CONCURRENT_COUNT = 4


def held_out(fact_counts: tuple[int, ...]) -> list[Question]:
    return [
        make_question(20_000 + index, fact_counts[index % len(fact_counts)])
        for index in range(QUESTION_COUNT)
    ]


def share_right(questions: list[Question], texts: list[str]) -> float:
    pairs = zip(questions, texts, strict=True)
    return sum(is_right(question, text) for question, text in pairs) / len(questions)


def test_questions_are_answered_through_the_pair(fleet: Fleet) -> None:
    prefill = fleet.prefill()
    decode = fleet.decode([prefill])
    fleet.wait_ready()

    def ask(question: Question) -> str:
        sampling: Body = {"temperature": 0, "max_new_tokens": 32}
        return decode.generate({"text": question.prompt, "sampling_params": sampling}).text

    questions = held_out(FACT_COUNTS)
    with ThreadPoolExecutor(CONCURRENT_COUNT) as pool:
        texts = list(pool.map(ask, questions))
    assert share_right(questions, texts) >= RIGHT_SHARE_MIN
    fleet.wait_at_rest()


@dataclass
class Workers:
    """The real workers of both servers, connected; the test stands in for the schedulers."""

    prefill: WorkerProcesses
    decode: WorkerProcesses
    tokenizer: PreTrainedTokenizerFast
    ids: Iterator[int]

    def connect(self) -> None:
        self.decode.send(OpenPeer("prefill"))
        descriptor = self.decode.expect(PeerOpened).descriptor
        self.prefill.send(ConnectPeer("decode", self.decode.ready[0].layout, [descriptor]))
        self.prefill.expect(PeerConnected)

    def answer(self, question: Question, corrupted_page: int | None = None) -> str:
        """Prefill on one side, transfer, decode on the other.

        corrupted_page: logical page of the prompt that is overwritten at the target between the
        transfer and the first decode step, as a stale writer of another request would.
        """
        request_id = next(self.ids)
        tokens = self.tokenizer(question.prompt).input_ids
        page_count = -(-len(tokens) // self.prefill.config.page_size)
        pages = list(range(1, page_count + 1))
        sampling = SamplingParams(max_new_tokens=16, seed=0, temperature=0.0)
        new = [NewSequence(request_id, tokens, len(tokens), sampling)]
        grant = PageGrant(request_id, 0, 0, pages)
        chunk = PrefillChunk(request_id, 0, len(tokens), is_last=True)
        output = self.prefill.step(new=new, grants=[grant], chunks=[chunk]).token_ids
        self.send(request_id, len(tokens), pages, pages)
        if corrupted_page is not None:
            # Another page of the same prompt: plausible bytes in the wrong place.
            other = pages[(corrupted_page + page_count // 2) % page_count]
            self.send(request_id, PAGE_TOKEN_COUNT, [other], [pages[corrupted_page]])
        self.prefill.step(retired=[request_id])
        new = [NewSequence(request_id, tokens + output, len(tokens), sampling)]
        grants = [PageGrant(request_id, 0, 0, [*pages, page_count + 1, page_count + 2])]
        while output[-1] != self.tokenizer.eos_token_id and len(output) < sampling.max_new_tokens:
            done = self.decode.step(new=new, grants=grants, decode=[request_id])
            output += done.token_ids
            new, grants = [], []
        self.decode.step(retired=[request_id])
        return str(self.tokenizer.decode(output, skip_special_tokens=True))

    def send(self, transfer_id: int, count: int, source: list[int], target: list[int]) -> None:
        """Put the pages of tokens [0, count) and wait until they are flushed."""
        send_id = next(self.ids)
        self.prefill.request_send(
            WholeSend(
                send_id=send_id,
                step_id=0,
                transfer_id=transfer_id,
                peer="decode",
                token_start=0,
                token_stop=count,
                is_final=True,
                source_pages=[(0, source)],
                target_pages=[(0, target)],
            )
        )
        settled = self.prefill.expect(SendSettled)
        assert settled.send_id == send_id and settled.error == ""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    changes = {"page_size": PAGE_TOKEN_COUNT, "cpu_thread_count": 1}
    with (
        WorkerProcesses(CHECKPOINT, Role.PREFILL, **changes) as prefill,
        WorkerProcesses(CHECKPOINT, Role.DECODE, **changes) as decode,
    ):
        prefill.wait_ready()
        decode.wait_ready()
        connected = Workers(prefill, decode, tokenizer, count(1))
        connected.connect()
        yield connected


def test_one_corrupted_page_shows_as_wrong_answers(workers: Workers) -> None:
    questions = held_out((16, 24, 32))
    assert share_right(questions, [workers.answer(q) for q in questions]) >= RIGHT_SHARE_MIN
    pages = [pages_of_fact(workers.tokenizer, question)[-1] for question in questions]
    corrupted = [workers.answer(q, page) for q, page in zip(questions, pages, strict=True)]
    assert share_right(questions, corrupted) <= 0.25
