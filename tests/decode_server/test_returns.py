"""Which turns are offered back, to whom, and what the next turn has of them.

What is offered, asked and computed is read from the messages of the real cores.
"""

from __future__ import annotations

import pytest

from common.errors import ProtocolError
from common.layout.component import FULL, Live
from common.protocol.peer import Offer, PeerMessage, TransferDone, TransferRequest
from common.protocol.too_large import failure_of_unread_result
from common.protocol.worker import Send, SendSettled
from common.scheduling.events import (
    Event,
    FromPeer,
    FromWorker,
    Report,
    ToPeer,
    ToWorkers,
    UnreadableRequest,
)
from decode_server.expected_time import ExpectedTime
from decode_server.returns import NEW_TOKENS_MIN
from tests.decode_server.test_prefixes import FAMILIES, PAGE_SIZE, PROMPT, Pair
from tests.sim.node import Node
from tests.sim.world import World

OUTPUT_COUNT = 20
PREFILL_COUNT = 4


def returning_pair(
    lives: tuple[Live, ...] = (FULL,),
    *,
    prefill_count: int = 1,
    may_fall_back: bool = False,
    digest_lookahead: int = 0,
) -> tuple[Pair, Node]:
    """Its decode server computes rests in a tenth of the time that asking takes. The second decode
    server, which is returned as well, computes none."""
    pair = Pair(lives, prefill_count=prefill_count)
    other = pair.world.add("d1", "decode", PAGE_SIZE, 200)
    other.links, other.page_counts = pair.decode.links, pair.decode.page_counts
    other.checkpoint_max, other.prompt_token_s = pair.decode.checkpoint_max, 0.001
    pair.decode.computes_rests, pair.decode.prompt_token_s = True, 0.00001
    pair.decode.may_fall_back = may_fall_back
    for node in pair.world.nodes.values():
        node.returns_caches, node.digest_lookahead = True, digest_lookahead
    pair.begin()
    return pair, other


def offers_of(pair: Pair) -> list[tuple[str, Offer]]:
    """To whom, and what."""
    return [
        (effect.link, effect.message)
        for _, effect in pair.told
        if isinstance(effect, ToPeer) and isinstance(effect.message, Offer)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_was_computed_here_goes_to_where_its_conversation_began(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that server has much to do. A turn elsewhere is computed from the end of the last
    answer."""
    pair, other = returning_pair(FAMILIES[family], prefill_count=PREFILL_COUNT)
    first = pair.turn(PROMPT, OUTPUT_COUNT)
    ((home, _),) = offers_of(pair)
    with monkeypatch.context() as patch:
        patch.setattr(ExpectedTime, "asked_s", lambda _, source, __: 9 + 90 * (source.link == home))
        second = pair.turn([*PROMPT, *first.output, 7, 8, 9], OUTPUT_COUNT)
    assert pair.counted("d0", "local_prefills") == 1, "nobody was asked for the second turn"
    assert [link for link, _ in offers_of(pair)] == [home] * 2
    home_name = home.partition(":")[0]
    assert pair.counted(home_name, "returns_kept") == 2
    names = [node.name for node in pair.world.nodes.values() if node.role == "prefill"]
    before = sum(map(pair.computed_count, names))
    known = [*second.prompt, *second.output]
    third = pair.world.submit(other, [*known, 7, 8, 9], OUTPUT_COUNT)
    pair.finish(third)
    # Of the last token of an answer there is no cache.
    assert sum(map(pair.computed_count, names)) - before <= 4 + (len(known) - 1) % PAGE_SIZE
    pair.end()


@pytest.mark.parametrize("family", ["plain", "hybrid"])
@pytest.mark.parametrize("output_count", range(20, 20 + PAGE_SIZE))
def test_with_a_draft_a_turn_goes_on_from_the_end_of_the_answer_too(
    family: str, output_count: int
) -> None:
    """Also where that is the end of a block, whose name depends on the token behind it."""
    pair, other = returning_pair(FAMILIES[family], digest_lookahead=1)
    first = pair.turn(PROMPT, output_count)
    known = [*PROMPT, *first.output]
    assert pair.counted("p0", "returns_kept") == 1
    before = pair.computed_count("p0")
    pair.finish(pair.world.submit(other, [*known, 7, 8, 9], 4))
    assert pair.computed_count("p0") - before == 1 + 3
    pair.end()


def test_a_prompt_that_no_server_has_goes_to_one_that_would_be_asked() -> None:
    """Nothing could be asked when it came; there is a server when its answer ends."""
    pair, other = returning_pair(may_fall_back=True)
    both_ways = frozenset(("p0", "d0"))
    pair.world.network.cut.add(both_ways)
    pair.world.run(pair.world.now + 3.0)
    client = pair.submit(PROMPT, 400)
    pair.world.run(pair.world.now + 2.5)
    assert pair.counted("d0", "computed_here") == 1 and not client.finals
    pair.world.network.cut.discard(both_ways)
    pair.finish(client)
    ((link, offer),) = offers_of(pair)
    known_count = len(PROMPT) + len(client.output) - 1
    assert (link, offer.token_count) == ("p0:1", known_count // PAGE_SIZE * PAGE_SIZE)
    before = pair.computed_count("p0")
    pair.finish(pair.world.submit(other, [*PROMPT, *client.output, 5], 2))
    assert pair.computed_count("p0") - before <= PAGE_SIZE + 1
    pair.end()


def test_a_rest_that_adds_little_is_not_offered() -> None:
    pair, _ = returning_pair()
    first = pair.turn(PROMPT, OUTPUT_COUNT)
    pair.turn([*PROMPT, *first.output, 7], 4)
    assert pair.counted("d0", "local_prefills") == 1 and NEW_TOKENS_MIN > 4 + 1
    assert len(offers_of(pair)) == 1
    pair.end()


def test_of_several_answers_to_a_prompt_none_is_offered() -> None:
    pair, _ = returning_pair()
    clients = pair.world.submit_samples(pair.decode, PROMPT, OUTPUT_COUNT, 3)
    pair.finish(*clients)
    assert offers_of(pair) == []
    pair.end()


@pytest.mark.parametrize("unread", [TransferRequest, TransferDone])
def test_a_return_of_which_a_message_can_not_be_read_ends_at_once(
    unread: type[TransferRequest | TransferDone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between servers of two versions. Nobody waits for a time limit."""
    pair, _ = returning_pair()
    post, garbled_at = World.post, []

    def post_garbled(world: World, sender: Node, link: str, message: PeerMessage) -> None:
        receiver = world.nodes[link.partition(":")[0]]
        is_return = receiver.role == ("decode" if unread is TransferRequest else "prefill")
        if not isinstance(message, unread) or not is_return:
            post(world, sender, link, message)
            return
        garbled_at.append(world.now)
        event: Event
        if isinstance(message, TransferRequest):
            asker = message.incarnation
            event = UnreadableRequest(f"{sender.name}:1", message.transfer_id, asker, "of later")
        else:
            failed = failure_of_unread_result(
                message.transfer_id, message.peer_incarnation, ProtocolError("of later")
            )
            event = FromPeer(sender.name, failed)
        world.after(0.001, lambda: receiver.feed(event))

    monkeypatch.setattr(World, "post", post_garbled)
    client = pair.submit(PROMPT, OUTPUT_COUNT)
    while not garbled_at:
        pair.world.run(pair.world.now + 0.01)
    pair.world.run(pair.world.now + 0.1)
    assert pair.counted("p0", "returns_lost") == 1, "it is known not to come"
    assert pair.counted("p0", "returns_kept") == 0
    pair.finish(client)
    pair.end()


def test_a_return_whose_connection_breaks_with_its_last_bytes_under_way_costs_no_more() -> None:
    """That it has settled and that its peer is lost is known by one report."""
    pair, _ = returning_pair()
    client = pair.submit(PROMPT, OUTPUT_COUNT)
    returned: list[Send] = []
    while not returned:
        pair.world.run(pair.world.now + 0.001)
        sent = [effect for name, effect in pair.told if name == "d0"]
        messages = [effect.message for effect in sent if isinstance(effect, ToWorkers)]
        returned = [message for message in messages if isinstance(message, Send)]
    send_id, transfer_id = returned[0].send_id, returned[0].transfer_id
    broken = SendSettled(send_id, transfer_id, 0, "reset by peer", 0, 0, 0.0, is_quiet=False)
    pair.decode.feed(FromWorker(broken))
    assert pair.counted("d0", "returns_failed") == 1
    pair.finish(client)
    pair.finish(pair.submit([*PROMPT, *client.output, 7], OUTPUT_COUNT))
    pair.end()


@pytest.mark.parametrize("unreachable", ["refused", "silent"])
def test_a_pair_without_a_way_back_works_and_returns_nothing(unreachable: str) -> None:
    """As behind a firewall that lets prefill servers through, and nobody to them."""
    pair = Pair()
    for node in pair.world.nodes.values():
        node.returns_caches = True
    pair.decode.unreachable_peers = unreachable
    pair.begin()
    (source,) = pair.core.transfers.links.connections.sources()
    first = pair.turn(PROMPT, OUTPUT_COUNT)
    pair.turn([*PROMPT, *first.output, 7], OUTPUT_COUNT)
    assert offers_of(pair) == [] and pair.counted("p0", "peers_lost") == 0
    assert pair.core.transfers.links.connections.sources() == [source], "it is the same connection"
    warnings = [
        e.text for n, e in pair.told if n == "d0" and isinstance(e, Report) and e.is_warning
    ]
    expected = ["no caches go back between here and prefill server p0:1: connection refused"]
    assert warnings == (expected if unreachable == "refused" else [])
    pair.end()


def test_a_server_that_takes_no_caches_is_offered_none() -> None:
    """Also if the conversation began there."""
    pair = Pair(prefill_count=2)
    pair.decode.computes_rests, pair.decode.prompt_token_s = True, 0.00001
    pair.decode.returns_caches = True
    pair.begin()
    first = pair.turn(PROMPT, OUTPUT_COUNT)
    pair.turn([*PROMPT, *first.output, 7, 8, 9], OUTPUT_COUNT)
    assert offers_of(pair) == [] and pair.counted("d0", "local_prefills") == 1
    pair.end()
