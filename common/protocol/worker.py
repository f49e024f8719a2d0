"""Messages between the scheduler and the workers of one server. Grouped by receiver.

Knows nothing of sockets. Every message is a tagged struct; `codec.py` turns it into bytes and back.
`request_id` is unique in one server process; `peer` is "<incarnation>" of the other server;
`transfer_id` is random per transfer attempt.
"""

from __future__ import annotations

import msgspec

from common.config import TransferMode
from common.protocol.descriptor import RankDescriptor
from common.protocol.digests import Digest, Digested
from common.protocol.weights import DropWeights, LoadWeights, WeightsLoaded
from common.protocol.worker_values import PassTimes, PeerWriter
from common.request import SamplingParams, TokenLogprobs
from common.weights import ServedWeights


class _Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A tagged struct. Its tag is the class name."""


# ---- to a worker --------------------------------------------------------------------------------


class NewSequence(_Message, frozen=True):
    """A request the worker does not know yet.

    token_ids: the prompt and tokens generated elsewhere; prompt_count of them are the prompt.
    proposals: what may follow them, guessed elsewhere, for the first step that decodes.
    """

    request_id: int
    token_ids: list[int]
    prompt_count: int
    sampling: SamplingParams
    proposals: list[int] = []


class PageGrant(_Message, frozen=True):
    """Pages of one group for a sequence, at logical indices first_index, first_index + 1, ..."""

    request_id: int
    group: int
    first_index: int
    page_ids: list[int]


class PageCopies(_Message, frozen=True):
    """Pages of one group, each copied whole, source to target. A target is no other's source."""

    group: int
    source_ids: list[int]
    target_ids: list[int]


class SampleDraw(msgspec.Struct, frozen=True, array_like=True):
    """A new sequence with the tokens and the sampling of another one, but a seed of its own."""

    request_id: int
    seed: int


class PrefillChunk(_Message, frozen=True):
    """Compute tokens [start, stop) of a sequence; sample the next token if is_last.

    samples: of a last chunk: sequences to begin, each of which draws its first token from the
        chunk's last row; then the chunk's own sequence draws none.
    state_pages: per page group, where the sequence's state behind this chunk is kept, 0 for groups
        that are no slots; then the next chunk of the step is of the same sequence and goes on from
        there. None: the state is left in the sequence's own slots.
    """

    request_id: int
    start: int
    stop: int
    is_last: bool
    state_pages: list[int] = []
    samples: list[SampleDraw] = []

    @property
    def drawing(self) -> list[int]:
        """The sequences that get a token from it."""
        if not self.is_last:
            return []
        return [sample.request_id for sample in self.samples] or [self.request_id]


class Step(_Message, frozen=True):
    """One forward pass: apply new sequences, page grants and copies, run chunks and decodes.

    copies: of pages as the steps before have left them, made before this one computes.
    decode: sequences that compute the KV of their latest token and sample the next one.
    retired: sequences to forget before anything else is applied.
    decode_tokens: the latest token of each of `decode`, where a pipeline stage that draws no tokens
        learns them from here. None where steps are sent before those tokens are known.
    draft_counts: how many proposals for each of `decode` may be verified: there are pages for so
        many tokens behind the latest one. Empty: none of any.
    guess_count: of tokens to guess behind the first one of each prompt that ends, if pages allow.
    """

    step_id: int
    new: list[NewSequence] = []
    grants: list[PageGrant] = []
    chunks: list[PrefillChunk] = []
    decode: list[int] = []
    retired: list[int] = []
    decode_tokens: list[int] = []
    copies: list[PageCopies] = []
    draft_counts: list[int] = []
    guess_count: int = 0


class OpenPeer(_Message, frozen=True):
    """Open a transport end for this peer incarnation to write through; answered by PeerOpened.

    layout: the peer's ServerLayout, msgpack as in the handshake. link: the address it was dialled
    at. Both only matter where transfers may be staged, as `transfer_mode` says.
    host_ids, pids: of the peer's ranks, kept for a scheduler that comes after this one.
    """

    peer: str
    layout: bytes = b""
    link: str = ""
    transfer_mode: TransferMode = TransferMode.DIRECT
    host_ids: list[str] = []
    pids: list[int] = []


class ConnectPeer(_Message, frozen=True):
    """Connect to the target ranks of a peer; answered by PeerConnected or PeerFailed.

    layout: the peer's ServerLayout, msgpack as in the handshake.
    """

    peer: str
    layout: bytes
    ranks: list[RankDescriptor]
    transfer_mode: TransferMode = TransferMode.DIRECT


class ClosePeer(_Message, frozen=True):
    """Drop the connection to a peer and destroy its transport end; answered by PeerClosed."""

    peer: str


class ReclaimPeer(_Message, frozen=True):
    """Nothing of a closed peer can write here any more: its staging slots may be given away, and no
    later scheduler has to hear of it."""

    peer: str


class Expect(_Message, frozen=True):
    """Staged pieces of this transfer may be scattered into these pages, if this peer sends them.

    token_start, token_count, pages: as in the TransferRequest.
    """

    transfer_id: int
    peer: str
    token_count: int
    pages: list[tuple[int, list[int]]]
    token_start: int = 0


class Forget(_Message, frozen=True):
    """Scatter no more pieces of a transfer; answered by Forgotten, known or not."""

    transfer_id: int


class OpenTransfer(_Message, frozen=True):
    """Pages of a transfer that this rank is to write, for all of its Sends; comes before them.

    source_pages, target_pages: per page group (first logical page index, page ids). Of window
        groups the source's pages are not known yet; they come with the last Send. The target's
        are those that the TransferRequest names: what it has already is not among them.
    """

    transfer_id: int
    peer: str
    source_pages: list[tuple[int, list[int]]]
    target_pages: list[tuple[int, list[int]]]


class Send(_Message, frozen=True):
    """Transfer items of one request, from this rank to every target rank of the peer.

    send_id: unique per transfer attempt and piece; answered by exactly one SendSettled.
    step_id: the step that computes these tokens: layer groups leave as it finishes them. 0 if all
        is computed already.
    transfer_id: of an OpenTransfer that was sent before.
    token_start, token_stop: the token range whose streamable items leave now. It may be empty if
        is_final: the target has all of them then.
    is_final: also send what is only final after `token_stop` tokens (windows, tails, slots).
    window_pages: source pages of window groups, if this is the final Send of a cache that has any.
        Per page group as in OpenTransfer; of the other groups empty.
    """

    send_id: int
    step_id: int
    transfer_id: int
    token_start: int
    token_stop: int
    is_final: bool
    window_pages: list[tuple[int, list[int]]] = []


class CancelSends(_Message, frozen=True):
    """Stop issuing puts of a transfer. Each Send still settles, and only that proves quiet."""

    transfer_id: int


class CloseTransfer(_Message, frozen=True):
    """All Sends of a transfer have settled and no other follows: its pages can be forgotten."""

    transfer_id: int


class MovePages(_Message, frozen=True):
    """Copy whole pages between the pool and the tier in host memory, beside the engine; answered by
    PagesMoved.

    is_spill: whether they go from the pool to host memory; else they come back from there. Nobody
    else writes to any of these pages until then, and nobody reads the targets.
    """

    move_id: int
    is_spill: bool
    pages: list[PageCopies]


class Begin(_Message, frozen=True):
    """A scheduler takes this worker on; answered by its WorkerReady.

    Whatever the one before left is ended first: steps run to their end, sends are cancelled, peers
    are closed, sequences are forgotten. session: random, of this scheduler.
    """

    session: str


class Release(_Message, frozen=True):
    """This scheduler ends, and another one is to follow: end what it leaves, as for `Begin`.

    is_quiet: no peer can write here any more; each has sent its last message of every transfer.
    load_id: of weights that were loaded, to be computed with from then on; "" for none.
    """

    is_quiet: bool
    load_id: str = ""


class Shutdown(_Message, frozen=True):
    """End the worker after its current step."""


# ---- to the scheduler ---------------------------------------------------------------------------


class WorkerReady(_Message, frozen=True):
    """Weights are loaded, pools are warm.

    page_counts: pages per group without the scratch page. fingerprint: values that both sides must
    share. layout: this server's ServerLayout, msgpack. describe: for /server_info.
    host_id, pid: name the process that writes into the memory of a peer on the same host.
    checkpoint_max: how many of the slots, tails and windows are there for checkpoints of prefixes,
        beside those of requests that run.
    pass_times: what a first pass took.
    host_page_counts: pages per group of the tier in host memory; none without one.
    session: of the `Begin` that it answers; "" before the first one.
    writers: peers of earlier schedulers that may still write here.
    device: what it computes on, cpu or cuda.
    weights: that it computes with.
    """

    rank: int
    page_counts: list[int]
    layout: bytes
    fingerprint: dict[str, str]
    vocab_size: int
    context_length: int
    eos_token_ids: list[int]
    describe: dict[str, str]
    host_id: str = ""
    pid: int = 0
    checkpoint_max: int = 0
    pass_times: PassTimes = PassTimes()
    host_page_counts: list[int] = []
    session: str = ""
    writers: list[PeerWriter] = []
    device: str = "cpu"
    weights: ServedWeights = ServedWeights()


class WorkerBeat(_Message, frozen=True):
    """This rank's I/O thread runs; its engine may not. progress: counts finished layers and, on a
    CPU, the time that the engine's thread has computed."""

    rank: int
    progress: int


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """What became of the proposals for one sequence in a step.

    proposed_count: how many were verified. token_ids: what was drawn behind the sequence's token
    in `StepDone.token_ids`, one for each proposal that was accepted; the cache of all tokens before
    the last of these is there. logprobs: of them, where asked for.
    """

    proposed_count: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []


class StepDone(_Message, frozen=True):
    """Tokens sampled in a step, in the order chunks-that-were-last, then decode.

    logprobs: by request id, where asked for.
    prompt_logprobs: `encode_logprobs` of the chunk's prompt tokens, by request id.
    failed: request id -> reason, for sequences that have no token. unfit: those of them that
        failed by their own request, such as its grammar. The others had logits that are not finite.
    accepted: by request id, of sequences that had proposals. guesses: likewise, of `guess_count`.
    """

    step_id: int
    request_ids: list[int]
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, bytes] = {}
    failed: dict[int, str] = {}
    seconds: float = 0.0
    unfit: list[int] = []
    accepted: dict[int, Accepted] = {}
    guesses: dict[int, list[int]] = {}


class PeerOpened(_Message, frozen=True):
    peer: str
    rank: int
    descriptor: RankDescriptor


class PeerConnected(_Message, frozen=True):
    """transports: of the puts. transfer_mode: how transfers will travel, as measured."""

    peer: str
    rank: int
    transports: str
    transfer_mode: str = ""


class Forgotten(_Message, frozen=True):
    """No piece of a transfer is being scattered on this rank, and none will be."""

    transfer_id: int
    rank: int


class PeerFailed(_Message, frozen=True):
    """The connection to a peer could not be made or broke.

    is_inbound: what could not be made is that through which the peer writes here.
    """

    peer: str
    rank: int
    reason: str
    is_inbound: bool = False


class PeerClosed(_Message, frozen=True):
    """Nothing of this peer can reach this rank any more, nor this rank the peer."""

    peer: str
    rank: int


class PagesMoved(_Message, frozen=True):
    """A MovePages has ended on a rank. With an error, what lies in its targets means nothing."""

    move_id: int
    rank: int
    error: str = ""


class SendSettled(_Message, frozen=True):
    """Every operation of a Send has returned. error "" means its bytes are final at the target.

    exposed_nbytes: how many of its bytes were not yet at the target when the last chunk's last
        layer was computed.
    is_quiet: no byte of this Send changes at the target any more. False only with an error: the
        connection broke, and the network may carry some until the target has closed its end.
    """

    send_id: int
    transfer_id: int
    rank: int
    error: str
    nbytes: int
    run_count: int
    seconds: float
    is_quiet: bool = True
    exposed_nbytes: int = 0


SchedulerToWorker = (
    Step
    | OpenPeer
    | ConnectPeer
    | ClosePeer
    | ReclaimPeer
    | OpenTransfer
    | Send
    | CancelSends
    | CloseTransfer
    | Expect
    | Forget
    | Digest
    | MovePages
    | LoadWeights
    | DropWeights
    | Begin
    | Release
    | Shutdown
)
# WorkerReport: what a core is told; the rest is for the process around it.
WorkerReport = (
    WorkerReady
    | WorkerBeat
    | StepDone
    | PeerOpened
    | PeerConnected
    | PeerFailed
    | PeerClosed
    | SendSettled
    | Forgotten
    | Digested
    | PagesMoved
)
WorkerToScheduler = WorkerReport | WeightsLoaded
