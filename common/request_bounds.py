"""What a request may ask for: one definition of every bound that a client's values are held to.

The HTTP readers, the schemas that they publish and the codec between servers all take their numbers
from here, so that whatever a frontend lets in, every other process takes. Knows nothing of the
names that clients use, nor of messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

INT32_MAX = 2**31 - 1  # token ids, page tables and process ids are int32
INT64_MAX = 2**63 - 1  # ids, rooms and seeds are int64
FLOAT32_MAX = 3.4028234663852886e38  # parameters are float32 on the device


@dataclass(frozen=True, slots=True)
class NumberBounds:
    """A finite number between two finite ones; the low one may be excluded."""

    low: float
    high: float
    is_low_allowed: bool = True

    def admits(self, value: float) -> bool:
        """False for NaN and the infinities."""
        return self.low < value <= self.high or (self.is_low_allowed and value == self.low)

    def __str__(self) -> str:
        return f"{'[' if self.is_low_allowed else '('}{self.low:g}, {self.high:g}]"


# ---- how tokens are drawn, see `SamplingParams` --------------------------------------------------

SAMPLING_NUMBERS: dict[str, NumberBounds] = {
    "temperature": NumberBounds(0.0, FLOAT32_MAX),
    "top_p": NumberBounds(0.0, 1.0, is_low_allowed=False),
    "min_p": NumberBounds(0.0, 1.0),
    "repetition_penalty": NumberBounds(0.0, 2.0, is_low_allowed=False),
    "presence_penalty": NumberBounds(-2.0, 2.0),
    "frequency_penalty": NumberBounds(-2.0, 2.0),
}
"""By field of `SamplingParams`. SGLang's ranges."""

LOGIT_BIAS = NumberBounds(-FLOAT32_MAX, FLOAT32_MAX)
LOGIT_BIAS_COUNT_MAX = 4096
STOP_TOKEN_COUNT_MAX = 1024
ALLOWED_TOKEN_COUNT_MAX = 1 << 18  # as many as the largest vocabularies have
BAD_WORD_COUNT_MAX = 1024
BAD_WORD_LENGTH_MAX = 64  # tokens; each word is compared with as many of the output at every step
ASKED_LOGPROB_COUNT_MAX = 1024
TOP_LOGPROB_COUNT_MAX = 128  # reported for every token, so it multiplies the size of an answer
TOP_K_ALL = -1
TOP_K_MAX = INT32_MAX
SEED_MAX = INT64_MAX
GRAMMAR_LENGTH_MAX = 1 << 16
"""Characters of a grammar: what is compiled for a request takes a time that grows with its text."""

PROPOSAL_COUNT_MAX = 32
"""Tokens that are guessed ahead of a sequence, to be verified in one step."""

# ---- a request and what is told of it ------------------------------------------------------------

TOKEN_ID_MAX = INT32_MAX
TOKEN_COUNT_MAX = 2**24
"""Of prompt and output together, an order of magnitude above the longest context known."""

REQUEST_TIMEOUT_S_MAX = 24 * 3600
ROOM_MAX = INT64_MAX
SAMPLE_COUNT_MAX = 4096  # of one body; each is a request of its own in the scheduler's queue
N_MAX = 128
"""Samples of one prompt, as OpenAI's. They share its cache and its room, and each draws from a copy
of one row of logits."""
RID_LENGTH_MAX = 256
NUMBERED_RID_LENGTH_MAX = RID_LENGTH_MAX + len(f"_{SAMPLE_COUNT_MAX - 1}")
"""A rid with the number of its sample behind it."""
PRIORITY_MAX = INT32_MAX
"""Of either sign: a server may read priorities the other way round."""
CLIENT_LENGTH_MAX = 32  # characters of a client's digest
CACHE_SALT_LENGTH_MAX = 256  # characters; twice vLLM's

# W3C's, version 00: trace id, parent span id, flags.
TRACE_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
# Of one request: 128 Ki positions with the 20 likeliest tokens take about 40 MiB. A TransferDone
# with them stays below what a peer takes as one message.
PROMPT_LOGPROBS_NBYTES_MAX = 48 << 20
