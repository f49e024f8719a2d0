"""Messages between the scheduler of a decode server and the scheduler of a prefill server.

The decode server dials; the prefill server's bootstrap port answers. Order of a connection:

    decode                          prefill
    Hello  ------------------------>            versions, fingerprint, layout
           <------------------------ Welcome    or Refuse with every difference
    Attach ------------------------>            where to write: addresses and memory keys
           <------------------------ Attached   every prefill rank reached every decode rank
    Heartbeat <--------------------> Heartbeat  both ways from then on

and of a transfer: TransferRequest -> TransferDone | TransferFailed; Abort -> Quiesced; or, before
there is anything to abort, Withdraw.
TransferDone, TransferFailed and Quiesced are each terminal for their transfer id: sent after every
operation of every writer has returned, so the target's pages are quiet from then on.
"""

from __future__ import annotations

import msgspec

from common.config import TransferMode, Verify
from common.failures import Failure
from common.protocol.descriptor import RankDescriptor
from common.request import Claim, Origin, SamplingParams, TokenLogprobs, TransferTrace

# 1: the first release. A room is for one sample: those of one body are in rooms that follow each
#    other, each asked for alone.
# 2: a room is for all samples of a prompt. Caches of answers go back (Offer). A request has a
#    claim. A server closes what it shares with an earlier scheduler of the same workers before it
#    answers the next one (succession).
PROTOCOL_VERSION = 2
PROTOCOL_VERSION_MIN = 1
VERSION_OF_SHARED_ROOMS = 2
VERSION_OF_SUCCESSION = 2


class _Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A tagged struct. Its tag is the class name."""


class Hello(_Message, frozen=True):
    """Opens a connection. incarnation: random per process start. layout: ServerLayout, msgpack.

    transfer_mode: how this side may be written to. A peer without the field knows no staging.
    host_ids, pids: of its ranks (see hosts.py), for a peer that can watch their processes.
    verify: the share of a cache that it wants compared. A peer without the field can't compare.
    name, http_address: for operators; no decision depends on them.
    sends, receives: whether caches leave it, and whether it takes some.
    sends_rest: whether it can send the rest of a cache whose beginning the other side has.
    """

    version_min: int
    version_max: int
    role: str
    incarnation: str
    fingerprint: dict[str, str]
    layout: bytes
    transfer_mode: TransferMode = TransferMode.DIRECT
    host_ids: list[str] = []
    pids: list[int] = []
    verify: Verify | None = None
    name: str = ""
    http_address: str = ""
    sends: bool = False
    receives: bool = True
    sends_rest: bool = False


class Welcome(_Message, frozen=True):
    """version: that both sides use from here on. request_token_max: the longest prompt it takes.

    credits: as in Heartbeat.
    host_ids, pids: of the ranks that will write (see hosts.py), for the proof that they are gone.
    name, http_address: for operators; no decision depends on them.
    role, sends, receives, sends_rest: as in Hello.
    """

    version: int
    incarnation: str
    fingerprint: dict[str, str]
    layout: bytes
    request_token_max: int
    host_ids: list[str] = []
    pids: list[int] = []
    transfer_mode: TransferMode = TransferMode.DIRECT
    verify: Verify | None = None
    name: str = ""
    http_address: str = ""
    credits: int | None = None
    role: str = "prefill"
    sends: bool = True
    receives: bool = False
    sends_rest: bool = False


class Refuse(_Message, frozen=True):
    """differences: every reason, each naming the field and both values. Neither side stops.

    is_closed: the sender has closed what it shared with an earlier scheduler of the processes that
        it refuses; False from releases that don't say.
    """

    incarnation: str
    differences: list[str]
    is_closed: bool = False


class Attach(_Message, frozen=True):
    """Where each decode rank can be written by this prefill incarnation.

    attachment: another number for every Attach of the decode process. Attached repeats it, and
        requests name it. A request that arrives after a later Attach may name pages that belong
        to another request by then.
    """

    incarnation: str
    peer_incarnation: str
    ranks: list[RankDescriptor]
    attachment: int = 0


class Attached(_Message, frozen=True):
    """Every writer is connected. transports: of the caches, per pair of ranks."""

    incarnation: str
    peer_incarnation: str
    transports: list[str]
    attachment: int = 0


class Detached(_Message, frozen=True):
    """The writers of this connection are gone or never came; the decode server dials again.

    is_planned: its sender drains after a SIGTERM, and nothing is wrong.
    """

    incarnation: str
    peer_incarnation: str
    reason: str
    is_planned: bool = False


class Heartbeat(_Message, frozen=True):
    """progress: counter of finished layers. is_busy: a step is running.

    queued_token_count: of a prefill server, prompt tokens queued or being computed.
    running_count: of a decode server, running requests.
    is_draining: it takes no new transfers, and finishes those that it has.
    trouble: why its engine makes no progress; "" if it does.
    credits: how many requests that bring their tokens the decode server may have open at this
        prefill server, until a newer number arrives. None: no limit.
    cached_prefixes: of its prefix cache, the first 8 bytes of each digest from which it can go on
        computing, in any order; None if they are as they were told last.
    """

    incarnation: str
    sequence: int
    progress: int
    is_busy: bool
    queued_token_count: int = 0
    running_count: int = 0
    echo_sequence: int = 0
    trouble: str = ""
    is_draining: bool = False
    credits: int | None = None
    cached_prefixes: bytes | None = None


class TransferRequest(_Message, frozen=True):
    """A reservation: the decode server's pages are waiting for this request's cache.

    peer_incarnation: the prefill process it is meant for; another process ignores it.
    room: the number that a router gave both sides. None: token_ids and sampling are sent instead.
    is_held: the room is one under which the prefill server holds a cache that it has computed.
    token_count: tokens whose cache is wanted; both sides count positions from it.
    token_start: the cache of the tokens before it is there already, of what grows with every token;
        a border of pages. Windows, tails and slots are wanted whole.
    pages: per page group (first logical page index, page ids) for the live items that are wanted.
    prefix_digests: of the beginnings of token_ids (see prefix_digests.py), if there are any.
    writers: ranks of the prefill server that the decode server expects to write.
    budget_ms: how long this may still take. is_self_test: no client waits, and no metric counts it.
    attachment: of the Attach that the pages were reserved behind; under another, it is ignored.
    seeds: of the samples of this prompt, if there are several; each draws a first token. With a
        room, the client's body says how many there are, and how they draw.
    claim: what decides whose turn it is at the prefill server, as far as a client's half in the
        same room does not say it.
    """

    transfer_id: int
    incarnation: str
    peer_incarnation: str
    token_count: int
    pages: list[tuple[int, list[int]]]
    budget_ms: int
    writers: list[int]
    room: int | None = None
    token_ids: list[int] = []
    prompt_count: int = 0
    sampling: SamplingParams | None = None
    is_self_test: bool = False
    origin: Origin = Origin()
    is_held: bool = False
    attachment: int = 0
    token_start: int = 0
    prefix_digests: bytes = b""
    seeds: list[int] = []
    claim: Claim = Claim()


class Offer(_Message, frozen=True):
    """A turn of a conversation has ended here, and the next one will be sent to the peer, which may
    ask for the cache by a TransferRequest with `is_held` for this room. Nothing is kept for it
    meanwhile. Sent only to a peer that takes caches.

    token_count: of prompt and answer, as far as their cache is here. prefix_digests: of them all.
    rest_token_ids: those behind the peer's last whole block, which no digest names.
    next_token_ids: behind these; as many as a digest covers more than it names, so none without a
        draft.
    """

    room: int
    incarnation: str
    peer_incarnation: str
    token_count: int
    prefix_digests: bytes
    rest_token_ids: list[int] = []
    next_token_ids: list[int] = []


class TransferDone(_Message, frozen=True):
    """The cache is complete and flushed at the target; here is the first token.

    writers: ranks that wrote (or had nothing to write), to compare with the expected set.
    first_tokens: of all samples, if there are several, in the order of their seeds; first_token is
        the first one of them. logprobs: of each sample, or of none.
    prompt_logprobs: `encode_logprobs` of each chunk. Schedulers pass them on unread: reading a
        million of them takes longer than a peer may be silent.
    digests: per decode rank, of the bytes written to it; empty without verification.
    proposals: tokens that may follow first_token, guessed by a draft; to be verified, not to be
        believed. None for samples.
    """

    transfer_id: int
    peer_incarnation: str
    token_count: int
    first_token: int
    writers: list[int]
    trace: TransferTrace
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[bytes] = []
    digests: list[bytes] = []
    first_tokens: list[int] = []
    proposals: list[int] = []


class TransferFailed(_Message, frozen=True):
    """The transfer ended without a result. is_retryable: another prefill server may try.

    status: the HTTP status it maps to if no other server tries.
    """

    transfer_id: int
    peer_incarnation: str
    kind: str
    message: str
    status: int
    is_retryable: bool

    @staticmethod
    def of(transfer_id: int, peer_incarnation: str, failure: Failure) -> TransferFailed:
        return TransferFailed(
            transfer_id,
            peer_incarnation,
            failure.kind,
            failure.message,
            failure.status,
            failure.is_retryable,
        )


class Abort(_Message, frozen=True):
    """The decode server gave up. Answered by Quiesced, whether or not the id is known.

    is_closed: it has closed the connections that this transfer was written through, so no bytes
        that the network still carries arrive. After a broken connection, only then is Quiesced
        true.
    """

    transfer_id: int
    incarnation: str
    peer_incarnation: str
    reason: str
    is_closed: bool = False


class Withdraw(_Message, frozen=True):
    """The decode half of a room gave up before it reserved pages. No reservation will follow.

    Without it the prefill half would wait until its rendezvous times out. Not answered.
    """

    room: int
    incarnation: str
    reason: str


class Quiesced(_Message, frozen=True):
    """No operation of this transfer is outstanding, and none will start."""

    transfer_id: int
    peer_incarnation: str


DecodeToPrefill = Hello | Attach | TransferRequest | Abort | Withdraw | Heartbeat | Detached | Offer
PrefillToDecode = (
    Welcome | Refuse | Attached | Detached | TransferDone | TransferFailed | Quiesced | Heartbeat
)
PeerMessage = DecodeToPrefill | PrefillToDecode
