"""Who is next where many wait: an urgent request overtakes all others, and a client with few
requests does not wait for all of one that has many."""

from __future__ import annotations

from concurrent.futures import Future

import httpx
import pytest

from tests.e2e.fleet import Body, Fleet, Node, reply_of

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

FLOODING, FEW = "sk-flooding", "sk-few"
FLOOD_COUNT = 10
LONG: Body = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
SHORT_TOKEN_COUNT = 5
SHORT: Body = {"temperature": 0, "max_new_tokens": SHORT_TOKEN_COUNT, "ignore_eos": True}


@pytest.fixture(scope="module")
def narrow(fleet: Fleet) -> Node:
    """A decode server that runs one request at a time, and asks for keys; its prefill server does
    not."""
    prefill = fleet.prefill()
    flags = ("--max-running-requests", "1", "--api-key", f"{FLOODING},{FEW}")
    decode = fleet.decode([prefill], *flags)
    decode.key = FLOODING
    fleet.wait_ready()
    return decode


def test_the_urgent_and_those_of_a_client_with_few_overtake_a_flood(
    fleet: Fleet, narrow: Node
) -> None:
    def ask(name: str, key: str, **fields: int) -> Future[httpx.Response]:
        body: Body = {"text": f"Facts of {name}:", "sampling_params": SHORT, "rid": name, **fields}
        return fleet.in_background(narrow, body, key)

    with narrow.stream({"text": "Facts:", "sampling_params": LONG}) as running:
        assert next(running).meta_info.finish_reason is None
        asked = [ask("the next", FLOODING)]
        narrow.wait_queued("ready")  # who comes now waits until it has a place
        asked += [ask(f"flood {number}", FLOODING) for number in range(FLOOD_COUNT)]
        narrow.wait_queued("waiting", FLOOD_COUNT)
        asked.append(ask("few", FEW))
        narrow.wait_queued("waiting", FLOOD_COUNT + 1)
        asked.append(ask("unimportant", FEW, priority=-1))
        narrow.wait_queued("waiting", FLOOD_COUNT + 2)
        asked.append(ask("urgent", FLOODING, priority=1))
        narrow.wait_queued("waiting", FLOOD_COUNT + 3)
        assert next(running).meta_info.finish_reason is None
        assert not any(future.done() for future in asked)
    for future in asked:
        reply_of(future.result())
    listed = narrow.get("/requests").json()["requests"]
    ended = [
        one["rid"] for one in reversed(listed) if one["completion_tokens"] == SHORT_TOKEN_COUNT
    ]
    assert ended[:3] == ["the next", "urgent", "few"]
    assert ended[-1] == "unimportant"
    fleet.wait_at_rest()
