"""A flush forgets what nobody reads, and nothing while requests are open."""

from __future__ import annotations

from common.layout.cache_layout import ServerLayout
from common.layout.families import gqa_components
from common.prefix_digests import DIGEST_NBYTES, extend_digests
from common.protocol.frontend import CallDone, FlushCache
from common.protocol.worker import StepDone
from common.request import SamplingParams
from common.scheduling.batch_limits import BatchLimits
from common.scheduling.batcher import Batcher
from common.scheduling.events import ToFrontend
from common.scheduling.flush import Flushes
from common.scheduling.in_flight import IN_FLIGHT_MAX
from common.scheduling.page_account import PageAccount
from common.scheduling.peers import Outbox

EOS = 7

DIGESTS = extend_digests(bytes(DIGEST_NBYTES), range(12), 4)


class Rig:
    def __init__(self) -> None:
        components = gqa_components(layer_count=1, kv_head_count=1, head_dim=2, dtype="float32")
        self.layout = ServerLayout(components, 1, ((0, 1),), page_size=4)
        self.account = PageAccount(self.layout.groups, [8], has_prefix_cache=True, digest_tokens=4)
        limits = BatchLimits(64, 4, 32, frozenset({EOS}), IN_FLIGHT_MAX)
        self.batcher = Batcher(self.account, limits)
        self.outbox = Outbox()
        self.flushes = Flushes(self.account, self.batcher, self.outbox)

    def answers(self) -> list[CallDone]:
        told = [effect.message for effect in self.outbox.take() if isinstance(effect, ToFrontend)]
        return [message for message in told if isinstance(message, CallDone)]

    @property
    def counts(self) -> tuple[int, int]:
        """Pages that hold prefixes, and pages that are free or hold some."""
        (state,) = self.account.states(self.layout)
        return state.cached, state.free


def test_cached_prefixes_go_only_when_no_request_is_open() -> None:
    rig = Rig()
    sampling = SamplingParams(max_new_tokens=1, seed=0)
    sequence = rig.account.open(1, list(range(12)), 12, sampling, DIGESTS)
    assert sequence is not None
    sequence.computed_count = 12
    rig.account.close(sequence)
    assert rig.counts == (3, 8)

    rig.flushes.handle(FlushCache(7), request_count=2)
    assert rig.answers() == [CallDone(7, False, "2 requests are running")]
    assert rig.counts == (3, 8)

    rig.flushes.handle(FlushCache(8), request_count=0)
    assert rig.answers() == [CallDone(8, True, "")]
    assert rig.counts == (0, 8)


def test_a_flush_waits_for_the_step_that_still_computes_who_has_ended() -> None:
    """Its client has its last token, and may well ask for a flush next."""
    rig = Rig()
    sampling = SamplingParams(max_new_tokens=9, seed=0)
    sequence = rig.account.open(1, list(range(12)), 12, sampling, DIGESTS)
    assert sequence is not None
    rig.batcher.add(sequence)
    steps = [rig.batcher.plan_step().step for _ in range(IN_FLIGHT_MAX)]
    for step, token in zip(steps, (EOS, 1), strict=True):
        assert step is not None
        for told in rig.batcher.apply_done(StepDone(step.step_id, [1], [token])).tokens:
            rig.batcher.remove(told.sequence)
        if token == EOS:
            rig.flushes.handle(FlushCache(7), request_count=0)
            assert rig.answers() == []
    rig.flushes.answer(request_count=0)
    assert rig.answers() == [CallDone(7, True, "")]
    assert rig.counts == (0, 8)
