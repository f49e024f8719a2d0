"""One message of every kind, with every field set to something that is not its default."""

from __future__ import annotations

from common.config import TransferMode, Verify
from common.layout.cache_layout import ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.layout.families import gqa_components
from common.protocol import (
    descriptor,
    digests,
    frontend,
    peer,
    staging,
    weights,
    worker,
    worker_values,
)
from common.protocol.codec import encode_layout, encode_logprobs
from common.protocol.descriptor import StagingBufferDescriptor, StagingRing
from common.request import (
    Bootstrap,
    CachedTokens,
    Claim,
    FinishKind,
    FinishReason,
    Grammar,
    GrammarKind,
    Origin,
    RequestTrace,
    SamplingParams,
    TokenLogprobs,
    TransferTrace,
)
from common.weights import ServedWeights

SAMPLING = SamplingParams(
    max_new_tokens=7,
    seed=3,
    min_new_tokens=1,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    logit_bias={5: -1.0, 9: 2.5},
    stop_token_ids=(2, 3),
    ignore_eos=True,
    return_logprob=True,
    top_logprobs_num=2,
    token_ids_logprob=(1, 4),
    logprob_start_len=0,
    grammar=Grammar(GrammarKind.REGEX, "[a-z]+"),
    allowed_token_ids=(5, 6, 7),
    bad_words=((5,), (6, 7)),
)
LOGPROBS = [
    TokenLogprobs(4, None),
    TokenLogprobs(5, -0.25, top=[(5, -0.25), (6, -3.0)], asked=[(1, -9.5)], rank=7),
]
TOLD = encode_logprobs(LOGPROBS)
TRACE = RequestTrace(
    request_id=9, peer="127.0.0.1:8998", status="ok", ttft_s=0.25, e2e_s=1.5, origin=Origin("r", "")
)
TRANSFER = TransferTrace(
    queue_s=0.1, prefill_s=0.2, nbytes=1 << 40, run_count=3, chunk_count=1, chunk_ends_s=[0.2]
)
WEIGHTS = ServedWeights("/models/step-5", "dummy", "step-5", "10ad")
ORIGIN = Origin("rid-1", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")

LAYOUT = ServerLayout(
    components=(
        *gqa_components(layer_count=6, kv_head_count=4, head_dim=8, dtype="bfloat16"),
        CacheComponent(
            name="conv",
            layers=(1, 4),
            segments=(Segment("q", 8, 12), Segment("v", 4, 8)),
            live=SLOT,
            shard=Shard.SPLIT,
            dtype="float32",
            order="C,K",
        ),
        CacheComponent(
            name="tail",
            layers=(0, 5),
            segments=(Segment("row", 1, 64),),
            live=Live(LiveKind.TAIL, 4, 4),
            shard=Shard.REPLICATE,
            dtype="bfloat16",
        ),
        CacheComponent(
            "w", (2,), (Segment("s", 4, 2),), Live(LiveKind.WINDOW, 9), Shard.SPLIT, "float16"
        ),
        CacheComponent(
            "b", (3,), (Segment("s", 4, 2),), Live(LiveKind.BLOCK, 8), Shard.SPLIT, "float16"
        ),
    ),
    tp_size=2,
    stages=((0, 4), (4, 6)),
    page_size=16,
    layer_group_count=2,
)
assert FULL in [group.live for group in LAYOUT.groups]

DESCRIPTOR = descriptor.RankDescriptor(
    rank=1,
    worker_address=b"\x00\xffaddress",
    regions=[("pages-0", 2**63 + 5, 1 << 20, b"key"), ("pages-1", 4096, 1, b"")],
    probe=("probe", 64, 64, b"k"),
    staging_buffer=StagingBufferDescriptor(
        "127.0.0.1:4000",
        ("staging-buffer", 4096, 8 << 20, b"key"),
        1 << 20,
        [StagingRing(0, 2**62, [0, 3]), StagingRing(3, 5, [7])],
    ),
    page_counts=[4, 0],
)

FRONTEND_TO_SCHEDULER: list[frontend.FrontendToScheduler] = [
    frontend.Submit(
        1,
        [5, 6, 7],
        SAMPLING,
        59.5,
        Bootstrap("host", 8998, 2**63 - 1),
        ORIGIN,
        b"d" * 16,
        [frontend.Sibling(2, 2**63 - 1, ORIGIN)],
        [8, 9],
        Claim(5, "0123456789abcdef"),
    ),
    frontend.Cancel(2, "because", True),
    frontend.Drain(),
    frontend.FlushCache(3),
    frontend.Pause(4, True),
    frontend.Continue(5),
    frontend.UpdateWeights(6, WEIGHTS, "inc"),
    frontend.SetPeers([frontend.WantedPeer("10.0.0.1:8998", is_dialled=False)]),
    frontend.GetState(4),
]
SCHEDULER_TO_FRONTEND: list[frontend.SchedulerToFrontend] = [
    frontend.Outputs(
        [
            frontend.Tokens(
                1,
                [8],
                LOGPROBS,
                [TOLD],
                CachedTokens(16, 8),
                FinishReason(FinishKind.STOP, matched=2, message="m"),
                TRACE,
                7,
            ),
            frontend.Failed(1, 503, "queue_full", "too many", TRACE),
        ]
    ),
    frontend.Traced(TRACE),
    frontend.CallDone(3, True, "done"),
    frontend.State(
        4,
        True,
        {"waiting": 2},
        {"requests": 3.0},
        [frontend.PageGroupState("full", False, 16, 16, 4096, 10, 5, 4, 1, 1)],
        [
            frontend.PeerState(
                "a:1",
                "inc",
                "connected",
                "fine",
                ["tcp"],
                2,
                1,
                16,
                3,
                ["direct"],
                "full",
                "open",
                1,
                True,
                [(0, 0), (1, 0)],
                "decode-0",
                "d:30000",
            )
        ],
        17,
        [{"rank": "0"}],
        "stuck",
        frontend.PrefixCacheState(4096, 16, 3, 2, 8, 5, "switched off"),
        True,
    ),
    frontend.ServerInfo(
        1000, 900, 8, 32000, [2], {"dtype": "float32"}, [{"rank": "0"}], "inc", 17, WEIGHTS
    ),
]
SCHEDULER_TO_WORKER: list[worker.SchedulerToWorker] = [
    worker.Step(
        5,
        [worker.NewSequence(1, [5, 6], 2, SAMPLING, [9])],
        [worker.PageGrant(1, 0, 3, [9, 8])],
        [worker.PrefillChunk(1, 0, 2, True, [3], [worker.SampleDraw(8, 2**63 - 1)])],
        [7],
        [6],
        [41],
        [worker.PageCopies(0, [9], [4])],
        [3],
        2,
    ),
    worker.OpenPeer("inc", encode_layout(LAYOUT), "host:8998", TransferMode.STAGED, ["host"], [17]),
    worker.ConnectPeer("inc", encode_layout(LAYOUT), [DESCRIPTOR], TransferMode.AUTO),
    worker.ClosePeer("inc"),
    worker.ReclaimPeer("inc"),
    worker.Begin("5e55"),
    weights.LoadWeights(WEIGHTS),
    weights.DropWeights(),
    worker.Release(True, "10ad"),
    worker.Expect(2**62, "inc", 17, [(0, [1, 2])], 8),
    digests.Digest(2**62, b"layout", True, 17, [(0, [1, 2])], Verify.FULL, 8),
    worker.Forget(2**62),
    worker.OpenTransfer(2**62, "inc", [(0, [1]), (0, [])], [(0, [2]), (3, [4])]),
    worker.Send(1, 3, 2**62, 0, 16, True, [(0, []), (3, [5])]),
    worker.CancelSends(2**62),
    worker.CloseTransfer(2**62),
    worker.MovePages(2**40, True, [worker.PageCopies(1, [9, 8], [4, 5])]),
    worker.Shutdown(),
]
WORKER_TO_SCHEDULER: list[worker.WorkerToScheduler] = [
    worker.WorkerReady(
        0,
        [100],
        encode_layout(LAYOUT),
        {"dtype": "float32"},
        32000,
        4096,
        [2],
        {"ucx": "1.22"},
        "host",
        17,
        3,
        worker_values.PassTimes(0.5, 0.25),
        [500],
        "5e55",
        [worker_values.PeerWriter("inc", ["host"], [17])],
        "cuda",
        WEIGHTS,
    ),
    worker.WorkerBeat(3, 2**40),
    worker.StepDone(
        5,
        [1],
        [8],
        {1: LOGPROBS[1]},
        {1: TOLD},
        {2: "not finite"},
        0.25,
        [2],
        {1: worker.Accepted(3, [9, 4], [LOGPROBS[1]])},
        {1: [7, 5]},
    ),
    worker.PeerOpened("inc", 1, DESCRIPTOR),
    worker.PeerConnected("inc", 1, "tcp", "direct"),
    worker.Forgotten(2**62, 1),
    digests.Digested(2**62, 1, [b"12345678", b""]),
    worker.PeerFailed("inc", 1, "refused", True),
    worker.PeerClosed("inc", 1),
    worker.PagesMoved(2**40, 1, "host memory has changed: page 7 of group full"),
    weights.WeightsLoaded(1, "10ad", "no such file"),
    worker.SendSettled(1, 2**62, 0, "", 4096, 1, 0.5, False, 1024),
]
DECODE_TO_PREFILL: list[peer.DecodeToPrefill] = [
    peer.Hello(
        1,
        2,
        "decode",
        "inc-d",
        {"dtype": "float32"},
        encode_layout(LAYOUT),
        TransferMode.AUTO,
        ["host"],
        [17],
        Verify.SAMPLE,
        "decode-0",
        "d:30000",
        sends=True,
        receives=False,
        sends_rest=True,
    ),
    peer.Attach("inc-d", "inc-p", [DESCRIPTOR], 4),
    peer.TransferRequest(
        transfer_id=2**63 - 1,
        incarnation="inc-d",
        peer_incarnation="inc-p",
        token_count=3,
        pages=[(0, [1, 2]), (3, [])],
        budget_ms=60_000,
        writers=[0, 1],
        room=7,
        token_ids=[5, 6, 7],
        prompt_count=2,
        sampling=SAMPLING,
        is_self_test=True,
        origin=ORIGIN,
        is_held=True,
        attachment=4,
        token_start=2,
        prefix_digests=b"d" * 16,
        seeds=[0, 2**63 - 1],
        claim=Claim(-5, "0123456789abcdef"),
    ),
    peer.Abort(1, "inc-d", "inc-p", "client went away", is_closed=True),
    peer.Withdraw(2**63 - 1, "inc-d", "client went away"),
    peer.Offer(2**63 - 1, "inc-d", "inc-p", 50, b"d" * 64, [5, 6], [7]),
    peer.Heartbeat("inc-d", 1, 2, True, 3, 4, 5, "stuck", True, 64, b"cached-1"),
    peer.Detached("inc-d", "inc-p", "lost", True),
]
PREFILL_TO_DECODE: list[peer.PrefillToDecode] = [
    peer.Welcome(
        1,
        "inc-p",
        {"dtype": "float32"},
        encode_layout(LAYOUT),
        4096,
        ["host"],
        [17],
        TransferMode.STAGED,
        Verify.FULL,
        "prefill-0",
        "p:30000",
        credits=64,
        role="decode",
        sends=False,
        receives=True,
        sends_rest=True,
    ),
    peer.Refuse("inc-p", ["dtype: ours float32, theirs bfloat16"], True),
    peer.Attached("inc-p", "inc-d", ["tcp"], 4),
    peer.Detached("inc-p", "inc-d", "lost", True),
    peer.TransferDone(
        1, "inc-p", 3, 8, [0, 1], TRANSFER, LOGPROBS, [TOLD], [b"12345678", b""], [8, 9], [7]
    ),
    peer.TransferFailed(1, "inc-p", "deadline", "too late", 504, True),
    peer.Quiesced(1, "inc-p"),
    peer.Heartbeat("inc-p", 1, 2, True, 3, 4, 5, "stuck", True, 64, b"cached-1"),
]
SLOT_FILLED: list[staging.SlotFilled] = [staging.SlotFilled(2**62, 9, 3, 2**62, 1, 4, 8, 16, 64)]
SLOT_FREED: list[staging.SlotFreed] = [staging.SlotFreed(2**62, 9, 3, "not expected here")]
