"""The digests of prompts' beginnings, under the salt that a body asks for.

They are made where bodies are checked and tokenised, so on another thread unless the body is small:
a long prompt takes some milliseconds. Knows nothing of what schedulers do with them.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from msgspec import Meta

from common.frontend.bodies.body import Body, fields_of, read
from common.frontend.bodies.bootstrap_address import spread
from common.frontend.bodies.fields import JsonObject
from common.frontend.bodies.sample import Limits
from common.prefix_digests import DIGEST_NBYTES, extend_digests, prefix_seed
from common.request_bounds import CACHE_SALT_LENGTH_MAX

NUL = "\0"
Salt: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=CACHE_SALT_LENGTH_MAX,
        pattern=r"^[^\x00]*$",
        description=f"a string of 1..{CACHE_SALT_LENGTH_MAX} characters, none of them NUL",
    ),
]


class SaltFields(Body, frozen=True):
    """What keeps the cache of a prompt apart from that of equal prompts: vLLM's name and SGLang's.
    Either alone means the same."""

    cache_salt: Salt | None = None
    extra_key: Salt | None = None

    @property
    def salt(self) -> str:
        """No two pairs of both have one salt: neither holds what stands between them."""
        return NUL.join(text for text in (self.cache_salt, self.extra_key) if text is not None)


def read_prefix_digests(
    body: JsonObject, prompts: Sequence[Sequence[int]], n: int, limits: Limits
) -> list[bytes]:
    """The seed and the digests of each prompt. Where this server keeps no prefixes they are b"", or
    known to the samples of the prompt alone if there are several, which share its blocks.

    prompts: their token ids. A salt is one for all prompts, or a list with one per prompt.
    Raises: RequestError if a salt is none, also where it is not used.
    """
    salts = [""] * len(prompts)
    if not fields_of(SaltFields).keys().isdisjoint(body):
        salts = [read(SaltFields, fields).salt for fields in spread(SaltFields, body, len(prompts))]
    fingerprint = limits.prefix_fingerprint
    if fingerprint is None:
        if n == 1:
            return [b""] * len(prompts)
        seeds = [secrets.token_bytes(DIGEST_NBYTES) for _ in prompts]
    else:
        seeds = [prefix_seed(fingerprint, salt) for salt in salts]
    return [
        extend_digests(seed, token_ids, lookahead=limits.digest_lookahead)
        for seed, token_ids in zip(seeds, prompts, strict=True)
    ]
