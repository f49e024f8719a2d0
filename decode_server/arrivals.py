"""The last word on a transfer: done, failed, or that its writer is quiet.

It counts only if it comes from the server that was asked, and only once. What arrived becomes a
running sequence; what did not is recovery's. Knows nothing of connections.
"""

from __future__ import annotations

from common.protocol.peer import Quiesced, TransferDone, TransferFailed
from common.scheduling.batcher import Batcher
from common.scheduling.sequence import Sequence
from common.scheduling.transitions import DecodeEvent
from decode_server.endings import Endings
from decode_server.prefill_peers import PrefillPeers
from decode_server.receiver import Receiver
from decode_server.recovery import Recovery
from decode_server.request import Transfer
from decode_server.verifier import Verifier


class Arrivals:
    """Takes the terminal messages of prefill servers in; stale_count: those that were nobody's."""

    def __init__(
        self,
        incarnation: str,
        batcher: Batcher,
        receiver: Receiver,
        verifier: Verifier,
        peers: PrefillPeers,
        endings: Endings,
        recovery: Recovery,
    ) -> None:
        self._incarnation = incarnation
        self._batcher = batcher
        self._receiver = receiver
        self._verifier = verifier
        self._peers = peers
        self._endings = endings
        self._recovery = recovery
        self.stale_count = 0

    def handle_quiet(self, link: str, message: Quiesced) -> None:
        if self._is_from_writer(link, message.transfer_id, message.peer_incarnation):
            self._receiver.apply_quiet(message.transfer_id)

    def handle_failed(self, link: str, failed: TransferFailed, now: float) -> None:
        """It brought nothing; pages of an abandoned one come back."""
        transfer = self._ended(link, failed)
        if transfer is not None:
            self._receiver.take(failed.transfer_id)
            self._recovery.handle_failed(transfer, failed, now)

    def handle_done(self, link: str, done: TransferDone, now: float) -> None:
        """The cache is there: compared first if it has to be, then decoded from."""
        transfer = self._ended(link, done)
        if transfer is None:
            return
        is_as_asked = (done.writers, done.token_count) == (transfer.writers, transfer.token_count)
        if is_as_asked and self._verifier.begin(transfer, done):
            return
        self._receiver.take(done.transfer_id)
        if is_as_asked:
            self._adopt(link, transfer, done, now)
        else:
            self._refuse(link, transfer, done, now)

    def _ended(self, link: str, message: TransferDone | TransferFailed) -> Transfer | None:
        """The transfer under way that a terminal message is of; that of an abandoned one proves its
        writer quiet, and nothing more."""
        if not self._is_from_writer(link, message.transfer_id, message.peer_incarnation):
            return None
        transfer = self._receiver.get(message.transfer_id)
        if transfer is None:
            self._receiver.apply_quiet(message.transfer_id)
        return transfer

    def _is_from_writer(self, link: str, transfer_id: int, peer_incarnation: str) -> bool:
        """Whether a terminal message may be taken for proof: it is meant for this process and came
        on the link of the server that was asked. Nobody's word counts for another's writes."""
        writer_link = self._receiver.link_of(transfer_id)
        if peer_incarnation == self._incarnation and writer_link == link:
            return True
        self.stale_count += 1
        return False

    def _refuse(self, link: str, transfer: Transfer, done: TransferDone, now: float) -> None:
        request = transfer.request
        assert request is not None and request.transfer is transfer
        text = (
            f"prefill wrote {done.token_count} tokens from ranks {done.writers}, "
            f"expected {transfer.token_count} from {transfer.writers}"
        )
        self._receiver.release(transfer)
        self._peers.note_failure(link, now)
        request.transfer = None
        request.note_failed()
        self._endings.fail(request, "transfer_failed", text, 500, now)

    def _adopt(self, link: str, transfer: Transfer, done: TransferDone, now: float) -> None:
        request = transfer.request
        assert request is not None and request.transfer is transfer
        self._peers.note_success(link, now)
        if request.is_held and self._batcher.ends_too_early(request.sampling, done.first_token):
            self._recovery.compute_again(transfer, now)
            return
        if request.first_token_at == 0.0:
            request.transfer_trace = done.trace
            request.prompt_logprobs = done.prompt_logprobs
        request.advance(DecodeEvent.DONE)
        request.transfer = None
        request.token_ids.append(done.first_token)
        sequence = Sequence(
            request.request_id,
            request.token_ids,
            request.prompt_count,
            request.sampling,
            transfer.spans,
            computed_count=done.token_count,
        )
        request.sequence = sequence
        self._batcher.add(sequence)
        logprobs = done.logprobs[0] if done.logprobs else None
        finish = self._batcher.finish_of(sequence)
        self._endings.tell_token(request, done.first_token, logprobs, finish, now)
