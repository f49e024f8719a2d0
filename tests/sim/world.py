"""The two real scheduler cores in one process, under a virtual clock and a seed.

What was sent to a process that ended meets its successor, as on a ZMQ socket that reconnects.
Servers can crash and come back as a new incarnation, freeze, drain, and leave a stopped worker
behind that writes once more. Whenever pages have moved, and with every tick, the invariants are
checked; at the end every request must have had exactly one final reply, with the tokens the oracle
says, and all pages must be back.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable

import msgspec

from common.failures import FailureKind
from common.layout.component import FULL, Live
from common.prefix_digests import DIGEST_NBYTES, extend_digests
from common.protocol.frontend import Cancel, Failed, Sibling, Submit, Tokens
from common.protocol.peer import VERSION_OF_SHARED_ROOMS
from common.request import Bootstrap, Claim, SamplingParams
from common.scheduling.events import (
    Effect,
    FromFrontend,
    FromPeer,
    PeerMessage,
)
from tests.sim import releases, wire
from tests.sim.client import BUDGET_S, DIGEST_TOKENS, Client
from tests.sim.network import Network
from tests.sim.node import Node
from tests.sim.promises import are_connected
from tests.sim.sim_worker import SimWorker

TICK_S = 0.25
# A deadline is looked at with every event, and a tick is one.
GRACE_S = 2 * TICK_S
REDELIVER_S = 0.05
# Failures that accidents can't cause: of what servers of one version and one model tell each other.
FAULTS = ("bad_request", "bad_reservation", "prompt_mismatch", "too_large", "bad_logits")


class World:
    """Nodes, the network between them, the clients and the time.

    lives: what the parts of the model see, each in a page group of its own; all of it comes first.
    damage_rate: of pieces of a transfer, how many leave one wrong value behind.
    slow_step_rate: of steps, how many take long.
    is_honest: whether nobody names transfers of others, so that no byte of an unknown one may land.
    is_hurried: whether some clients have little time. hold_s: how long a prefill server keeps half
    of a request, or what it computed ahead.
    follows_crashes: whether requests of a server that crashes are asked for again when it is back;
    follow: asks for them.
    knows_who_leaves: whether clients are sent to another server while theirs drains or is
    not there.
    calm_until: when the first accident happens.
    tally: what happened how often. slots_ran_out: whether any server ever had none left.
    retraction_count: of finished requests.
    watches_order: whether it is checked who begins before whom, which takes longer than to decide.
    claim_of: by its prompt, how urgent a request is and whose.
    last_due_at: when the last of what is planned happens, ticks and what they bring aside.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tally: Counter[str] = Counter()
        self.network = Network(self.rng, self.after, self.tally)
        self.lives: tuple[Live, ...] = (FULL,)
        self.damage_rate = 0.0
        self.damage_rng = random.Random(seed ^ 0xDA3A6E)
        self.slow_step_rate = 0.0
        self.transport = "posix"
        self.is_hurried = False
        self.calm_until = math.inf
        self.hold_s = 30.0
        self.is_honest = False
        self.follows_crashes = False
        self.follow: Callable[[Node], None] = lambda node: None
        self.knows_who_leaves = False
        self.slots_ran_out = False
        self.watches_order = True
        self.retraction_count = 0
        self.now = 1.0
        self.nodes: dict[str, Node] = {}
        self.clients: dict[int, Client] = {}
        self.claim_of: Callable[[list[int]], Claim] = lambda prompt: Claim()
        self.watchers: list[Callable[[Node, Effect], None]] = []  # told of all that is decided
        self.watches: set[tuple[str, str]] = set()
        self.lingering: dict[str, SimWorker] = {}
        self.log: list[str] | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._next = 0

    def add(self, name: str, role: str, page_size: int, pages: int) -> Node:
        self.nodes[name] = Node(self, name, role, page_size, pages)
        return self.nodes[name]

    def tell(self, name: str, what: object) -> None:
        """Into the log, if anybody wants to read it."""
        if self.log is not None:
            self.log.append(f"{self.now:9.4f} {name} {what}")

    # ---- time ------------------------------------------------------------------------------------

    def after(self, delay: float, call: Callable[[], None]) -> None:
        self._next += 1
        heapq.heappush(self._heap, (self.now + delay, self._next, call))

    @property
    def last_due_at(self) -> float:
        return max((at for at, _, _ in self._heap), default=self.now)

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        self.now = until

    def begin(self, rest_at: float = 3.0) -> None:
        """Boot all servers at once, and run until they are connected and at rest."""
        for node in self.nodes.values():
            node.boot()
        self.start_ticks()
        self.run(rest_at)

    def start_ticks(self) -> None:
        def tick() -> None:
            for node in self.nodes.values():
                node.tick()
            self.after(TICK_S, tick)

        self.after(0.0, tick)

    # ---- network ---------------------------------------------------------------------------------

    def post(self, sender: Node, link: str, message: PeerMessage) -> None:
        """A server's link to the one that it dialled is an address, and a bare name otherwise.
        Nobody listens at the address of a server that has come to dial."""
        receiver = self.nodes.get(link.partition(":")[0])
        if receiver is None or link in sender.hung_up:
            return
        life, sender_life = receiver.life, sender.life
        is_dialler = sender.dials(receiver)
        back = sender.name if is_dialler else f"{sender.name}:1"
        payload = wire.sent(releases.said(message, sender.release))

        def hear() -> None:
            if back in receiver.hung_up:
                self.tally["messages on links that were hung up"] += 1
                return
            heard = releases.heard(wire.heard_by_peer(payload), receiver.release)
            receiver.feed(FromPeer(back, heard))

        def deliver() -> None:
            # Who dials keeps what it sent until somebody listens there again; who is dialled loses
            # it with the connection.
            is_there = receiver.is_up and receiver.dials(sender) != is_dialler
            if receiver.life == life and is_there:
                hear()
            elif is_dialler and sender.life == sender_life and link not in sender.hung_up:
                if is_there:
                    self.tally["messages met by a successor"] += 1
                    hear()
                else:
                    self.after(REDELIVER_S, deliver)
            else:
                self.tally["messages lost with a process"] += 1

        self.network.carry(sender.name, receiver.name, self.now, deliver)

    def find_worker(self, incarnation: str) -> SimWorker | None:
        for node in self.nodes.values():
            if node.is_up and node.facts.incarnation == incarnation:
                return node.worker
        return self.lingering.get(incarnation)

    # ---- clients ---------------------------------------------------------------------------------

    def submit(
        self,
        node: Node,
        prompt: list[int],
        max_new_tokens: int,
        room: Bootstrap | None = None,
        budget_s: float = BUDGET_S,
        seed: bytes = bytes(DIGEST_NBYTES),
    ) -> Client:
        return self.submit_samples(node, prompt, max_new_tokens, 1, room, budget_s, seed)[0]

    def submit_samples(
        self,
        node: Node,
        prompt: list[int],
        max_new_tokens: int,
        count: int,
        room: Bootstrap | None = None,
        budget_s: float = BUDGET_S,
        seed: bytes = bytes(DIGEST_NBYTES),
    ) -> list[Client]:
        """So many samples of a prompt, each as a client of its own. The first release takes each of
        them alone, in a room of its own."""
        role, node = node.first_role, self.stand_in(node)
        if room is not None and not room.engine and room.host in self.nodes:
            room = msgspec.structs.replace(room, host=self.stand_in(self.nodes[room.host]).name)
        clients = [
            Client(
                len(self.clients) + 1 + place,
                prompt,
                max_new_tokens,
                node.name,
                budget_s=budget_s,
                room=room.room if room is not None and not room.engine else None,
                seed=seed,
                sample_seed=place,
                role=role,
                token_max=node.request_token_max,
            )
            for place in range(count)
        ]
        self.clients |= {client.request_id: client for client in clients}
        self.tally["requests"] += count
        if not node.is_open or node.role != role:
            for client in clients:
                client.finals.append("refused: server is down or stopping")
            return clients
        is_whole = node.release >= VERSION_OF_SHARED_ROOMS
        for place, part in enumerate([clients] if is_whole else [[one] for one in clients]):
            first, *others = part
            submit = Submit(
                first.request_id,
                list(prompt),
                SamplingParams(max_new_tokens=max_new_tokens, seed=first.sample_seed),
                budget_s,
                room and msgspec.structs.replace(room, room=room.room + place),
                prefix_digests=extend_digests(
                    seed, prompt, DIGEST_TOKENS, lookahead=node.digest_lookahead
                ),
                siblings=[Sibling(client.request_id, client.sample_seed) for client in others],
                claim=self.claim_of(prompt),
            )
            node.feed(FromFrontend(wire.from_frontend(submit)))
        return clients

    def stand_in(self, node: Node) -> Node:
        """Who is asked for what a server was to do at first: another one, if it has the other role
        by now, or is about to leave and that is known. Itself, if there is no other."""
        role = node.first_role
        if node.role == role and (node.is_open or not self.knows_who_leaves):
            return node
        others = (one for one in self.nodes.values() if one.role == role and one.is_open)
        return next(others, node)

    def cancel(self, client: Client) -> None:
        client.is_cancelled = True
        self.tally["cancelled requests"] += 1
        cancel = wire.from_frontend(Cancel(client.request_id))
        self.nodes[client.node].feed(FromFrontend(cancel))

    def note_failed(self, request_id: int) -> None:
        """A request has failed just now; its client may hear of it later."""
        client = self.clients.get(request_id)
        if client is not None:
            client.failed_at = self.now
            client.could_tell = client.room is not None and are_connected(self.nodes.values())

    def reply(self, node: str, message: Tokens | Failed) -> None:
        client = self.clients[message.request_id]
        if client.node != node:
            return
        assert not client.finals, f"request {client.request_id} was answered again: {message}"
        client.answered_at = self.now
        if isinstance(message, Failed):
            assert message.status == FailureKind(message.kind).status, f"{message}"
            is_lie = message.message.startswith("prefill wrote")
            assert not (self.is_honest and is_lie), f"{message}"
            assert not (self.is_honest and message.kind in FAULTS), f"{message}"
            client.finals.append("failed")
            client.failure = f"{message.kind}: {message.message}"
            return
        assert message.offset == len(client.output), f"{message}: {len(client.output)} have come"
        client.output += message.token_ids
        client.cached_count = max(client.cached_count, message.cached.count)
        if message.finish is not None:
            client.finals.append("finished")
            if message.trace is not None:
                self.retraction_count += message.trace.retraction_count
                client.retraction_count = message.trace.retraction_count


def connected_pair(
    prefill_page_count: int = 64, decode_page_count: int = 64, hold_s: float = 30.0
) -> World:
    """p0 and d0, connected and at rest, at time 3. hold_s: see `World`."""
    world = World(seed=1)
    world.hold_s = hold_s
    world.add("p0", "prefill", 4, prefill_page_count)
    world.add("d0", "decode", 4, decode_page_count).links = ["p0:1"]
    world.begin()
    return world
