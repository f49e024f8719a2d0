"""What must be true of a scheduler core between two events, whatever happened to it.

Every request is somewhere, so that something can still end it, and every page has one owner. Looks
at what the cores keep for themselves, and shares no arithmetic with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from common.config import TransferMode
from common.protocol.peer import Detached, Hello, PeerMessage, TransferRequest
from common.scheduling.batcher import Batcher
from common.scheduling.events import Effect, ToPeer
from common.scheduling.page_account import PageAccount
from common.scheduling.page_moves import Move
from common.scheduling.peers import REMOVED_REASON
from common.scheduling.prefix import Prefix
from common.scheduling.prefix_cache import PrefixCache
from common.scheduling.prefix_tree import Node
from common.scheduling.sequence import Sequence
from common.scheduling.transitions import DecodeState, PrefillState
from common.scheduling.waiting_queue import WaitingQueue
from common.transfers.connection import Standing
from common.transfers.incoming_transfer import IncomingTransfer
from decode_server.request import DecodeRequest
from decode_server.scheduler import DecodeScheduler
from prefill_server.request import PrefillRequest
from prefill_server.scheduler import PrefillScheduler

Core = PrefillScheduler | DecodeScheduler


def check_core(core: Core) -> None:
    """Raises: AssertionError."""
    if isinstance(core, DecodeScheduler):
        check_decode_requests(core)
    else:
        check_prefill_requests(core)
    check_pages(core)


# ---- requests ------------------------------------------------------------------------------------


def check_decode_requests(core: DecodeScheduler) -> None:
    """Who waits is in the queue, first those that have begun before; who hands over has a transfer,
    and who runs is in the batch."""
    queue, incoming = core.requests.queue, core.transfers.incoming
    for request in core.requests:
        name = f"request {request.request_id}"
        if request.parent is not None:
            check_sample(core, request)
            continue
        assert (request.state is DecodeState.WAITING) == (request.request_id in queue), (
            f"{name} is {request.state}: nobody will look at it again"
        )
        assert bool(request.seeds) == bool(request.children), f"{name} has no sample left"
        match request.state:
            case DecodeState.WAITING:
                assert request.transfer is None and request.sequence is None, name
            case DecodeState.TRANSFERRING:
                transfer = request.transfer
                assert transfer is not None, f"{name} waits for an unknown transfer"
                assert incoming.get(transfer.transfer_id) is transfer, f"{name}: it was given up"
                assert transfer.owner == request.request_id, f"{name}: it is another's"
            case DecodeState.RUNNING:
                assert request.sequence is not None, f"{name} runs without pages"
                assert is_computed(core.batcher, request.sequence), f"{name} is in no batch"
            case _:
                raise AssertionError(f"{name} is {request.state} and was not forgotten")
    batcher = core.batcher
    computing_count = len(batcher._running) + len(batcher._prompts)
    assert computing_count <= batcher.limits.running_max, "more compute than may"
    order = [
        (one.claim.priority, bool(one.requested_at or one.output_count)) for one in queue.in_order()
    ]
    assert order == sorted(order, reverse=True), "who has not begun waits before who has"
    check_queue(queue)
    assert incoming.under_way_count <= len(core.requests), "transfers without an owner"
    for awaited in core.requests.arriving._first.values():
        assert awaited.transfer is not None, "blocks are waited for that nobody brings"
    leaders = core._admission._followers._leaders.values()
    awaited = {one.request_id for leader in leaders for _, one in leader.followers}
    awaited |= {one.request_id for one in core.tier.waiting}
    assert queue._aside <= awaited, "a request was set aside for good"
    assert all(core.requests.get(request.request_id) is request for request in queue), (
        "a ghost waits"
    )


def check_sample(core: DecodeScheduler, sample: DecodeRequest) -> None:
    """It waits for its prompt, and nobody else looks at it."""
    parent, name = sample.parent, f"sample {sample.request_id}"
    assert parent is not None and core.requests.get(parent.request_id) is parent, name
    assert sample in parent.children and sample.state is DecodeState.WAITING, name
    assert sample.request_id not in core.requests.queue and sample.sequence is None, name
    has_pages = parent.state is not DecodeState.WAITING
    count = len(parent.children) - 1 if has_pages else 0
    assert len(parent.sample_pages) == count, f"{name}: pages of {len(parent.sample_pages)} samples"


def check_credits(core: DecodeScheduler, effects: Iterable[Effect]) -> None:
    """Nobody was asked just now for more at a time than it said it takes."""
    links = {
        effect.link
        for effect in effects
        if isinstance(effect, ToPeer)
        and isinstance(effect.message, TransferRequest)
        and effect.message.room is None
    }
    incoming = core.transfers.incoming
    transfers = [*incoming.under_way, *incoming.abandoned]
    for link in links:
        peer = core.transfers.links.connections.on_link(link)
        assert peer is not None
        count = sum(t.credit == peer.attachment and not t.is_quiet for t in transfers)
        assert peer.credits is None or count <= peer.credits, (
            f"{link} takes {peer.credits} at a time and was asked for {count}"
        )


def check_told(core: DecodeScheduler, link: str, message: PeerMessage, wanted: set[str]) -> None:
    """A prefill server that is let go is asked for nothing new, and is not left in the midst of a
    transfer. wanted: those that are not. Raises: AssertionError."""
    address = core.transfers.links.addresses.get(link)
    standing = address.standing if address is not None else None
    match message:
        case Detached(reason=reason) if reason == REMOVED_REASON:
            # A server that is kept only, and answers when it was lost already, is not taken back.
            is_up = address is not None and not (address.is_idle and not address.is_dialled)
            assert not (is_up and link in wanted), f"{link} was let go, and is wanted"
            incoming = core.transfers.incoming
            known = [*incoming.under_way, *incoming.abandoned]
            left = [one for one in known if one.link == link and not one.is_quiet]
            assert not left, f"{link} was let go with {len(left)} transfers under way"
        case TransferRequest(room=None, is_self_test=False):
            is_needed = address is not None and not (
                address.connection is not None and address.connection.is_leaving
            )
            assert standing is not Standing.LEAVING or is_needed, f"{link} leaves, and was asked"
        case Hello():
            is_wanted = standing in (Standing.WANTED, Standing.NAMED)
            assert is_wanted, f"{link} is {standing}, and was dialled"


def check_prefill_requests(core: PrefillScheduler) -> None:
    for request in core.requests:
        name = f"request {request.request_id} of the prefill server"
        sequence, is_queued = request.sequence, request.request_id in core.requests.queue
        assert (request.state is PrefillState.QUEUED) == is_queued, f"{name} is {request.state}"
        match request.state:
            case PrefillState.WAITING | PrefillState.HELD:
                room = core.meetings.rendezvous.waits_in(request.room or 0)
                assert room is request, f"{name} is in no room"
                is_held = request.state is PrefillState.HELD
                assert is_held == (sequence is not None), f"{name}: what is held has pages"
                assert request.transfer is None, name
            case PrefillState.QUEUED:
                assert (request.transfer is None) == request.is_ahead and sequence is None, name
            case PrefillState.PREFILLING:
                assert sequence is not None, f"{name} is computed without pages"
                assert is_computed(core.batcher, sequence), f"{name} is in no batch"
            case PrefillState.SENDING:
                assert request.is_on_its_way, f"{name} has nothing on its way and has not ended"
            case PrefillState.DRAINING:
                assert sequence is not None, name
                assert request.is_sending or core.batcher.is_in_flight(sequence), f"{name} drains"
            case _:
                raise AssertionError(f"{name} is {request.state} and was not forgotten")
    for transfer in core.transfers.outgoing:
        owner = core.requests.get(transfer.owner)
        is_waiting = core.meetings.rendezvous.holds(transfer)
        assert is_waiting or (owner is not None and owner.transfer is transfer), (
            f"transfer {transfer.transfer_id:x} waits for nothing"
        )
    check_followers(core)
    prompts = core.batcher._prompts.values()
    left = sum(len(sequence.token_ids) - sequence.chunk_start for sequence in prompts)
    assert core.batcher.unplanned_count == left, "prompt tokens are counted wrongly"
    waiting_count = sum(len(request.token_ids) for request in core.requests.queue)
    assert core.requests.queue.token_count == waiting_count, "tokens that wait are counted wrongly"


def check_followers(core: PrefillScheduler) -> None:
    """Who is set aside waits for a prompt that is computed, and for tokens that it has not got."""
    queue = core.requests.queue
    awaited: set[int] = set()
    for leader in core._admission._followers._leaders.values():
        assert core.batcher.computes_prompt(leader.sequence), "a prompt that has ended is followed"
        awaited.update(request.request_id for _, request in leader.followers)
    awaited.update(request.request_id for request in core.returns.followers)
    awaited.update(request.request_id for request in core.tier.waiting)
    check_queue(queue)
    looked_at = {request.request_id for request in queue.in_order()}
    for request in queue:
        is_there = request.request_id in looked_at or request.request_id in awaited
        assert is_there, f"request {request.request_id} was set aside for good"


def check_queue(queue: WaitingQueue[DecodeRequest] | WaitingQueue[PrefillRequest]) -> None:
    """All that wait are in the order, but for those that are set aside, and are counted."""
    in_order = [request.request_id for request in queue.in_order()]
    waiting = {request.request_id: request.claim for request in queue}
    assert len(in_order) == len(set(in_order)), "a request is in the order twice"
    assert set(in_order) == set(waiting) - queue._aside, "a request is not in the order"
    clients = Counter(claim.client for claim in waiting.values())
    assert queue.share.waiting == clients, "clients that wait are counted wrongly"


def forgotten_transfers(core: DecodeScheduler, cores: Mapping[str, Core]) -> set[int]:
    """Transfers that a decode server waits for and their prefill server does not know of. cores: by
    incarnation; a server that is not there any more is missed by its silence."""
    forgotten: set[int] = set()
    for transfer in core.transfers.incoming.under_way:
        writer = cores.get(transfer.peer)
        if transfer.is_quiet or not isinstance(writer, PrefillScheduler):
            continue
        if writer.transfers.outgoing.get(transfer.transfer_id) is None:
            forgotten.add(transfer.transfer_id)
    return forgotten


def is_set_aside(core: Core, transfer_id: int, pages: list[tuple[int, list[int]]]) -> bool:
    """Whether just these pages are a transfer's to be written."""
    incoming = core.transfers.incoming
    transfers = (incoming.get(transfer_id), *incoming.abandoned)
    known = (one for one in transfers if one is not None and one.transfer_id == transfer_id)
    return any(one.pages == pages for one in known)


def is_computed(batcher: Batcher, sequence: Sequence) -> bool:
    tables = (batcher._running, batcher._prompts, batcher._ready)
    return any(table.get(sequence.request_id) is sequence for table in tables)


# ---- pages ---------------------------------------------------------------------------------------


def check_pages(
    core: Core, kept: Iterable[IncomingTransfer] = (), prefixes: Iterable[Prefix] = ()
) -> None:
    """Used pages are those of sequences, of transfers and of the prefix cache; quarantined ones
    those of abandoned transfers. kept: transfers that have ended and whose pages are not given
    back. prefixes: that a test keeps."""
    owned = Owned(core.account)
    sequences = [request.sequence for request in core.requests if request.sequence is not None]
    leaving = core.batcher._leaving if isinstance(core, DecodeScheduler) else []
    for sequence in [*sequences, *leaving]:
        owned.add_sequence(sequence)
    for request in core.requests:
        for own in request.sample_pages if isinstance(request, DecodeRequest) else ():
            owned.add_pages(own)
    incoming = core.transfers.incoming
    for transfer in [*incoming.under_way, *kept]:
        owned.add(transfer)
    for prefix in prefixes:
        owned.add_prefix(prefix)
    quarantined = Owned(core.account)
    for transfer in incoming.abandoned:
        is_hidden = transfer.mode is TransferMode.STAGED
        (owned if is_hidden else quarantined).add(transfer)
    cache = core.account.cache
    if cache is not None:
        held = [r.held for r in core.requests if isinstance(r, DecodeRequest) and r.held]
        readers = [one.node for one in [*sequences, *leaving] if one.node is not None]
        readers += [one.node for one in held]
        if isinstance(core, DecodeScheduler):
            readers += [lent.node for lent in core.returns.lent]
        else:
            readers += [one.node for one in core.returns.held]
        readers += [one.copied_node for one in sequences if one.copied_node is not None]
        readers += [one.copied_node for one in leaving if one.copied_node is not None]
        readers += moving_nodes(core, cache)
        for move in core.tier.moves:
            if move.target is cache:
                owned.add_move(move)
        owned.add_cache(cache, check_tree(cache, readers))
        for flight in core.batcher._in_flight._flights:
            for _, checkpoint in flight.checkpoints:
                owned.add_pages(checkpoint.pages)
    check_host(core)
    owned.check("used", core.account.pool._used)
    quarantined.check("quarantined", core.account.pool._quarantined)
    for sequence in sequences:
        name = f"request {sequence.request_id}"
        assert sequence.cached_count < max(2, len(sequence.token_ids)), f"{name}: all is cached"


def moving_nodes(core: Core, cache: PrefixCache) -> list[Node]:
    """What copies to and from host memory keep of a cache."""
    sources = [move.source_node for move in core.tier.moves if move.source is cache]
    return sources + [move.target_node for move in core.tier.moves if move.target is cache]


def check_host(core: Core) -> None:
    """Used pages of the tier in host memory are those of its cache and of copies to it."""
    host = core.account.host
    if host is None:
        return
    host.pool.check()
    owned = Owned(core.account)
    for move in core.tier.moves:
        if move.target is host:
            owned.add_move(move)
    owned.add_cache(host, check_tree(host, moving_nodes(core, host)))
    owned.check("used in host memory", host.pool._used)


def check_tree(cache: PrefixCache, readers: Iterable[Node]) -> set[Node]:
    """All nodes. Who is read is locked, with all above it, and nobody else is."""
    tree = cache.tree
    nodes = set(tree.nodes())
    locked: set[Node] = set()
    users: Counter[Node] = Counter()
    for reader in readers:
        users[reader] += 1
        locked.update(reader.path())
    for leaf in tree._idle_leaves:
        assert not leaf.is_locked and leaf.is_leaf, "what is read could be evicted"
        nodes.update(leaf.path())
    nodes |= locked
    for node in nodes:
        assert node.users == users[node], "a lock was forgotten"
        assert node.is_locked == (node in locked), "what is above a lock is not locked"
        end, parent = node.end, node.parent
        # Nobody finds or reads what was cut off; who reads its parent may have put more there.
        is_cut_off = not node.is_locked and not tree.is_found(node)
        assert is_cut_off or parent is None or parent.end == node.start, "a path with a gap"
        for checkpoint in node.checkpoints:
            assert checkpoint.block_count <= end, "a checkpoint without its blocks"
    assert tree.block_count == sum(node.block_count for node in nodes)
    assert tree.locked_block_count == sum(one.block_count for one in locked)
    return nodes


class Owned:
    """Pages that somebody has, per group, one entry for every owner."""

    def __init__(self, account: PageAccount) -> None:
        self._account = account
        self._pages: list[list[int]] = [[] for _ in account.groups]

    def add(self, transfer: IncomingTransfer) -> None:
        """Those of its prefix are the prefix cache's."""
        for pages, (_, owned) in zip(self._pages, transfer.pages, strict=True):
            pages += owned

    def add_move(self, move: Move) -> None:
        """Those that it fills."""
        self.add_pages(move.pages)
        for _, copy in move.checkpoints:
            self.add_pages(copy.pages)

    def add_prefix(self, prefix: Prefix) -> None:
        for pages, owned in zip(self._pages, prefix.pages, strict=True):
            pages += owned

    def add_sequence(self, sequence: Sequence) -> None:
        """Those of blocks that the prefix cache has are its own."""
        self.add_pages(self._account.owned_pages(sequence))

    def add_pages(self, owned: Iterable[Iterable[int]]) -> None:
        for pages, of_group in zip(self._pages, owned, strict=True):
            pages += of_group

    def add_cache(self, cache: PrefixCache, nodes: Iterable[Node]) -> None:
        for node in nodes:
            for group, pages in zip(cache._growing, node.pages, strict=True):
                self._pages[group] += pages
            for checkpoint in node.checkpoints:
                self.add_pages(checkpoint.pages)

    def check(self, name: str, places: list[set[int]]) -> None:
        for group, (pages, place) in enumerate(zip(self._pages, places, strict=True)):
            once = set(pages)
            assert len(once) == len(pages), f"group {group}: a page has two owners"
            assert once <= place, f"group {group}: pages {sorted(once - place)} are not {name}"
            count = len(place) - len(once)
            assert not count, f"group {group}: {count} pages {name} by nobody"
