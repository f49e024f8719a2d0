"""Requests that wait for the scheduler's answer: found by number or name, and asked again.

A request keeps what it takes to ask for it once more: what was asked, and what its client has had.
Knows nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import structs

from common.errors import RequestError
from common.frontend.requests.request_handle import Asked, RequestHandle, SampleId
from common.frontend.requests.tracing import Tracing
from common.protocol.frontend import Sibling, Submit
from common.request import Origin


class OpenRequests:
    """The table of them, in the order in which they came or were numbered anew.

    cancel: what a handle calls that its client has left.
    """

    def __init__(self, cancel: Callable[[int, str], None], tracing: Tracing) -> None:
        self._cancel = cancel
        self._tracing = tracing
        self._next_id = 1
        self._by_id: dict[int, RequestHandle] = {}
        self._ids_of_rids: dict[str, int] = {}  # a cancelled request's rid is free again

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[RequestHandle]:
        return iter(list(self._by_id.values()))

    def get(self, request_id: int) -> RequestHandle | None:
        return self._by_id.get(request_id)

    def matching(self, rid_prefix: str) -> list[RequestHandle]:
        return [handle for handle in self if handle.rid.startswith(rid_prefix)]

    def make(
        self,
        asked: Asked,
        samples: Sequence[SampleId],
        output_ids: Sequence[int],
        now: float,
        *,
        is_streaming: bool,
        is_measured: bool,
    ) -> list[RequestHandle]:
        """New requests, one for each sample, which are not in the table yet.

        Raises: RequestError 400 if a request of one of their names is open.
        """
        rids = [sample.rid for sample in samples]
        for place, rid in enumerate(rids):
            if rid in self._ids_of_rids or rid in rids[:place]:
                raise RequestError(f"rid={rid!r}: a request of that id is still open", field="rid")
        handles: list[RequestHandle] = []
        for sample in samples:
            span = self._tracing.begin(asked.trace_parent) if is_measured else None
            parent = span.remote_prefill.trace_parent if span else asked.trace_parent
            handle = RequestHandle(
                self._cancel,
                self._take_id(),
                asked,
                sample.seed,
                Origin(sample.rid, parent),
                started_at=now,
                output_ids=output_ids,
                is_streaming=is_streaming,
                is_measured=is_measured,
            )
            handle.span_ids = span
            handles.append(handle)
        return handles

    def _take_id(self) -> int:
        """A number that no request has had."""
        self._next_id += 1
        return self._next_id - 1

    def add(self, handle: RequestHandle) -> None:
        self._by_id[handle.request_id] = handle
        self._ids_of_rids[handle.rid] = handle.request_id

    def remove(self, handle: RequestHandle) -> None:
        del self._by_id[handle.request_id]
        self.free_rid(handle)

    def free_rid(self, handle: RequestHandle) -> None:
        if self._ids_of_rids.get(handle.rid) == handle.request_id:
            del self._ids_of_rids[handle.rid]

    def renumber(self, handle: RequestHandle) -> None:
        """Whoever answers under the old number is not heard any more."""
        has_rid = self._ids_of_rids.get(handle.rid) == handle.request_id
        del self._by_id[handle.request_id]
        handle.request_id = self._take_id()
        self._by_id[handle.request_id] = handle
        if has_rid:
            self._ids_of_rids[handle.rid] = handle.request_id


def ask_again(
    handles: Iterable[RequestHandle], now: float
) -> list[tuple[Submit, list[RequestHandle]]]:
    """Messages that ask for requests, each with those that it asks for: with what their clients
    have had so far and what is left of their time. Samples of one body that nothing has come of
    share a message."""
    groups: dict[int, list[RequestHandle]] = {}
    for handle in handles:
        key = id(handle) if handle.output_ids else id(handle.asked)
        groups.setdefault(key, []).append(handle)
    return [(_submit_of(group, now), group) for group in groups.values()]


def _submit_of(group: list[RequestHandle], now: float) -> Submit:
    """Where something has come of a request, its room is used up."""
    first, *others = group
    asked, output_ids = first.asked, list(first.output_ids)
    return Submit(
        request_id=first.request_id,
        token_ids=asked.token_ids,
        sampling=structs.replace(asked.sampling, seed=first.seed),
        budget_s=first.left_s(now),
        bootstrap=None if output_ids else asked.bootstrap,
        origin=first.origin,
        prefix_digests=asked.prefix_digests,
        siblings=[Sibling(one.request_id, one.seed, one.origin) for one in others],
        output_ids=output_ids,
        claim=asked.claim,
    )
