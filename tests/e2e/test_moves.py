"""Streams that change servers while their clients read: a decode server drains, others go on with
what it would cut off; and prefill servers have decode servers answer plain requests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.fleet import Body, Fleet, Node, error_message, reply_of, wait_until
from tests.e2e.replies import Reply

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

COUNT = 200
GREEDY: Body = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
# So flat that what is drawn depends on seed and position alone, and not on a last bit of a logit.
SEEDED: Body = {"temperature": 1e4, "max_new_tokens": COUNT, "ignore_eos": True}
DRAWN: list[Body] = [
    SEEDED | {"sampling_seed": 5},
    SEEDED | {"sampling_seed": 6, "min_new_tokens": COUNT - 1, "stop_token_ids": [40]},
    {**SEEDED, "sampling_seed": 7, "regex": "([a-z]{9} )+"},
]
TOLD: Body = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
GREEDY_COUNT = 5
CANDIDATE_COUNT = 24
# Batches of other sizes round otherwise: a greedy answer is known for sure where the two likeliest
# tokens are further apart than that, all the way.
GAP_MIN = 0.02
QUICK_DRAIN = ("--drain-timeout", "0.4", "--relay-timeout", "60")


def answers_of(fleet: Fleet, node: Node) -> list[tuple[Body, Reply]]:
    """Bodies, each with what it is answered if nothing happens; the node has forgotten them."""
    greedy = [
        {"text": f"Facts number {place}:", "sampling_params": GREEDY, **TOLD}
        for place in range(CANDIDATE_COUNT)
    ]
    drawn = [{"text": "Facts:", "sampling_params": options} for options in DRAWN]
    replies = [fleet.in_background(node, body) for body in (*greedy, *drawn)]
    found = [
        (body, reply_of(reply.result()))
        for body, reply in zip((*greedy, *drawn), replies, strict=True)
    ]
    clear = [one for one in found[:CANDIDATE_COUNT] if gap_of(one[1]) > GAP_MIN]
    assert len(clear) >= GREEDY_COUNT
    wait_until(
        "what goes back to have gone", lambda: node.post("/flush_cache", {}).status_code == 200
    )
    return [*clear[:GREEDY_COUNT], *found[CANDIDATE_COUNT:]]


def gap_of(reply: Reply) -> float:
    """The smallest difference of log-probabilities between the two likeliest tokens."""
    tops = [top for top in reply.meta_info.output_top_logprobs if top is not None]
    return min((first[0] or 0.0) - (second[0] or 0.0) for first, second in tops)


@contextmanager
def started(directory: Path, decode_count: int, *flags: str) -> Iterator[tuple[Fleet, list[Node]]]:
    """A fleet with one prefill server, which is the last of its nodes."""
    with Fleet(directory) as fleet:
        prefill = fleet.prefill("--return-cache", "auto")
        decodes = [
            fleet.decode([prefill], "--return-cache", "auto", *flags, name=f"decode-{i}")
            for i in range(decode_count)
        ]
        fleet.wait_ready()
        yield fleet, [*decodes, prefill]


def stream(node: Node, body: Body) -> list[Reply]:
    with node.stream(body) as events:
        return list(events)


def begin(fleet: Fleet, node: Node, answers: list[tuple[Body, Reply]]) -> list[Future[list[Reply]]]:
    streams = [fleet.threads.submit(stream, node, body) for body, _ in answers]
    node.wait_queued("running", len(streams))
    return streams


def check(streams: list[Future[list[Reply]]], answers: list[tuple[Body, Reply]]) -> None:
    """Every stream has come to its end, token for token as if nothing had happened."""
    for one, (body, expected) in zip(streams, answers, strict=True):
        events = one.result()
        last = events[-1]
        assert last.output_ids == expected.output_ids, (body, last.meta_info)
        assert last.text == expected.text and last.finish == expected.finish
        counts = [len(event.output_ids) for event in events]
        assert counts == sorted(counts)
        for ours, theirs in (
            (last.meta_info.output_token_logprobs, expected.meta_info.output_token_logprobs),
            (last.meta_info.input_token_logprobs, expected.meta_info.input_token_logprobs),
        ):
            assert [entry[1] for entry in ours] == [entry[1] for entry in theirs]


def moved_count(node: Node) -> float:
    return node.info().counters["requests"]


def test_streams_of_a_server_that_stops_go_on_at_another_one(tmp_path: Path) -> None:
    with started(tmp_path, 2, *QUICK_DRAIN) as (fleet, (first, second, _)):
        answers = answers_of(fleet, second)
        before = moved_count(second)
        streams = begin(fleet, first, answers)
        first.server.process.send_signal(signal.SIGTERM)
        check(streams, answers)
        assert 0 < moved_count(second) - before <= len(answers)
        assert first.server.process.wait(30.0) == 0
        fleet.nodes.remove(first)
        fleet.wait_at_rest()


@pytest.mark.soak
def test_a_server_that_is_killed_with_what_it_took_over_is_followed_by_the_next(
    tmp_path: Path,
) -> None:
    with started(tmp_path, 3, *QUICK_DRAIN) as (fleet, (first, second, third, _)):
        answers = answers_of(fleet, third)
        streams = begin(fleet, first, answers)
        assert first.post("/drain", {}).json()["success"] is True
        wait_until("some of them to run elsewhere", lambda: second.has_queued("running"))
        second.kill()
        check(streams, answers)
        assert first.server.process.wait(30.0) == 0
        for node in (first, second):
            fleet.nodes.remove(node)
        fleet.wait_at_rest()


@pytest.mark.soak
def test_a_drain_with_nobody_to_go_to_cuts_off_what_takes_too_long(tmp_path: Path) -> None:
    with started(tmp_path, 1) as (fleet, (first, _)):
        endless: Body = {"text": "Facts:", "sampling_params": GREEDY | {"max_new_tokens": 1900}}
        with first.stream(endless) as events:
            next(events)
            first.server.process.send_signal(signal.SIGTERM)
            last = list(events)[-1]
        assert last.finish.type == "abort" and last.finish.err_type == "stopping"
        assert first.server.process.wait(30.0) == 0
        fleet.nodes.remove(first)


def test_plain_requests_to_a_prefill_server_are_answered_by_its_decode_servers(
    tmp_path: Path,
) -> None:
    with Fleet(tmp_path) as fleet:
        prefill = fleet.prefill("--serve-plain")
        decode = fleet.decode([prefill], starts=False)
        prefill.wait_ready()
        body: Body = {"text": "Facts:", "sampling_params": GREEDY | {"max_new_tokens": 24}}
        assert "no decode server is connected" in prefill.refused("/generate", body, 503)
        fleet.start(decode).wait_ready()
        wait_until(
            "the prefill server to see it",
            lambda: prefill.post("/generate", body).status_code == 200,
        )
        several = body | {
            "sampling_params": SEEDED | {"max_new_tokens": 24, "sampling_seed": 3, "n": 3},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        ours, theirs = prefill.generate_list(several), decode.generate_list(several)
        assert [one.output_ids for one in ours] == [one.output_ids for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            told = one.meta_info.input_token_logprobs
            assert [entry[1] for entry in told] == [
                entry[1] for entry in other.meta_info.input_token_logprobs
            ]
        assert stream(prefill, body)[-1].text == decode.generate(body).text
        chat: Body = {"messages": [{"role": "user", "content": "Facts?"}], "max_tokens": 9}
        texts = [
            node.post("/v1/chat/completions", chat | {"temperature": 0}).json()["choices"]
            for node in (prefill, decode)
        ]
        assert texts[0] == texts[1]
        decode.kill()
        fleet.nodes.remove(decode)
        wait_until(
            "the prefill server to miss it",
            lambda: is_missing(prefill.post("/generate", body)),
        )


def is_missing(response: httpx.Response) -> bool:
    return response.status_code == 503 and "no decode server" in error_message(response)
