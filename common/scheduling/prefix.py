"""What a server has of a cache that it asks another one for. A value.

Knows nothing of where the pages are kept, or who else reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.layout.cache_layout import PageGroup


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cache of the first tokens, as far as it grows with every token.

    token_count: a multiple of the tokens of a page, in every group that grows.
    pages: per page group, the page ids from logical index 0 on; none of windows, tails and slots.
    """

    token_count: int
    pages: Sequence[Sequence[int]]

    def fits(self, groups: Sequence[PageGroup], token_count: int) -> bool:
        """Whether it is a beginning of a cache of so many tokens, with just the pages it takes."""
        if not 0 <= self.token_count <= token_count or len(self.pages) != len(groups):
            return False
        growing = [
            (group.page_tokens, len(pages))
            for group, pages in zip(groups, self.pages, strict=True)
            if group.live.is_streamable
        ]
        page_count = sum(len(pages) for pages in self.pages)
        if page_count != sum(count for _, count in growing):
            return False
        if not growing:
            return self.token_count == 0
        return all(page_tokens * count == self.token_count for page_tokens, count in growing)
