"""The tokens that one call of the sampler drew: launched, and on the host once they are there.

Knows nothing of how they were drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.engine.host_copy import HostCopy
from common.engine.sampling.logprobs import LaunchedLogprobs
from common.request import TokenLogprobs

NOT_FINITE = "the model's logits are not finite"
ALL_MASKED = "every token is masked"


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of one draw. Row r of every field is row r of the logits.

    A failed row's token is meaningless, and one of the vocabulary all the same. unfit: failed rows
    whose request leaves no token to draw, though their logits are finite. logprobs: by row, for
    rows whose request wants them.
    """

    token_ids: list[int]
    failed: dict[int, str] = field(default_factory=dict)
    unfit: frozenset[int] = frozenset()
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Draw:
    """A draw that is launched.

    tokens: int64[R] on the device, for whatever is launched next.
    """

    def __init__(
        self,
        tokens: Tensor,
        checked: Tensor,
        failed: dict[int, str],
        logprob_rows: NDArray[np.int64],
        logprobs: LaunchedLogprobs | None,
    ) -> None:
        """checked: int64[3, R]: tokens, whether the logits were finite, whether any was allowed.

        failed: rows that are known to have failed. logprob_rows: the rows of `logprobs`.
        """
        self.tokens = tokens
        self._failed = failed
        self._logprob_rows = logprob_rows
        self._logprobs = logprobs
        self._copy = HostCopy([checked, *(logprobs.tensors if logprobs is not None else ())])

    def finish(self) -> Sampled:
        """Waits for the draw, not for what was launched after it. Safe on any thread."""
        checked, *rest = self._copy.wait()
        token_ids, is_usable, is_open = checked.numpy()
        broken = {int(row): NOT_FINITE for row in np.flatnonzero(is_usable == 0)}
        failed = {int(row): ALL_MASKED for row in np.flatnonzero(is_open == 0)}
        failed |= broken | self._failed
        logprobs: dict[int, TokenLogprobs] = {}
        if self._logprobs is not None:
            entries = self._logprobs.entries(rest)
            pairs = zip(self._logprob_rows.tolist(), entries, strict=True)
            logprobs = {row: entry for row, entry in pairs if row not in failed}
        unfit = frozenset(failed.keys() - broken.keys())
        return Sampled(token_ids.tolist(), failed, unfit, logprobs)
