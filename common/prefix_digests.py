"""Names of prompts' beginnings: one digest for every 16 tokens, chained over all tokens before.

    tokens     t0 .. t15 | t16 .. t31 | t32 .. t40
    digests    seed   d1           d2                  d2 = digest of (d1, t16 .. t31)

Equal digests mean equal tokens from the first one on, under an equal seed. The seed stands for all
else that a cache depends on, so equal digests mean equal caches on every server of a fingerprint.
A draft's row of a token depends on the token behind it, too. Where there is a draft, a digest
covers that token as well (`lookahead` 1); before it is known, there is no digest:

    digests    seed   d1           d2                  d2 = digest of (d1, t16 .. t32)
Digests are BLAKE2b (RFC 7693) of 16 bytes: nobody can make two prompts of one name. Whoever
tokenizes makes them; a scheduler only makes those of tokens that were generated.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

DIGEST_NBYTES = 16
# Every page size below divides it, and it divides every larger one.
DIGEST_TOKENS = 16
SEED_COUNT_MAX = 256  # that are kept: one for each salt that clients have used lately


def prefix_seed(fingerprint: Mapping[str, str], salt: str = "") -> bytes:
    """What the digests of a model's prompts begin with. fingerprint: as both servers compare it.

    salt: prompts under different salts have no common beginning.
    """
    return _seed(tuple(sorted(fingerprint.items())), salt)


@lru_cache(SEED_COUNT_MAX)
def _seed(fingerprint: tuple[tuple[str, str], ...], salt: str) -> bytes:
    state = blake2b(digest_size=DIGEST_NBYTES, person=b"baton-prefix")
    for text in (*(part for item in fingerprint for part in item), salt):
        encoded = text.encode("utf-8", "surrogatepass")
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.digest()


def extend_digests(
    digests: bytes,
    token_ids: Sequence[int],
    digest_tokens: int = DIGEST_TOKENS,
    lookahead: int = 0,
) -> bytes:
    """The seed and the digests of all whole 16 tokens, of which the first ones are known already.

    digests: of a beginning of these tokens, the seed alone at least. lookahead: tokens behind the
    16 that a digest covers as well.
    """
    known_count = len(digests) // DIGEST_NBYTES - 1
    start = known_count * digest_tokens
    stop = digest_count(len(token_ids), digest_tokens, lookahead) * digest_tokens
    if start >= stop:
        return digests
    tokens = array("i", token_ids[start : stop + lookahead]).tobytes()
    stride, covered = digest_tokens * 4, (digest_tokens + lookahead) * 4
    last, made = digests[-DIGEST_NBYTES:], [digests]
    for offset in range(0, (stop - start) * 4, stride):
        last = blake2b(last + tokens[offset : offset + covered], digest_size=DIGEST_NBYTES).digest()
        made.append(last)
    return b"".join(made)


def digest_count(token_count: int, digest_tokens: int = DIGEST_TOKENS, lookahead: int = 0) -> int:
    """Digests of so many tokens, the seed not among them."""
    return max(0, token_count - lookahead) // digest_tokens


def digests_nbytes(token_count: int, digest_tokens: int = DIGEST_TOKENS, lookahead: int = 0) -> int:
    """Bytes of the seed and the digests of so many tokens."""
    return DIGEST_NBYTES * (1 + digest_count(token_count, digest_tokens, lookahead))
