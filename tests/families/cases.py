"""What the tests of every family need to know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.families.server import Shape

# Page ends of both sides, one token, the end of a chunk, and past several of them.
LENGTHS = (1, 15, 16, 17, 64, 65, 150)


@dataclass(frozen=True)
class Case:
    """A recipe of a tiny checkpoint, and what handing its cache over has to be like.

    nbytes: what a prompt of so many tokens takes on a target of one rank, worked out by hand from
        the config: an oracle that knows nothing of components.
    growing_nbytes: what of that grows with the tokens, and so is not sent again to a target that
        has it. None for all.
    lengths: of prompts, at every border of the family.
    output_count: tokens that are compared; more than the longest thing that is still open when a
        prompt ends.
    sources, targets: every source is paired with every target.
    """

    recipe: str
    nbytes: Callable[[int], int]
    lengths: tuple[int, ...] = LENGTHS
    output_count: int = 64
    sources: tuple[Shape, ...] = (
        Shape(tp_size=2, page_size=8, chunk=40),
        Shape(pp_size=2, page_size=16, layer_group_count=2),
    )
    targets: tuple[Shape, ...] = (
        Shape(page_size=4),
        Shape(tp_size=2, pp_size=2, page_size=32),
    )
    growing_nbytes: Callable[[int], int] | None = None

    def rest_nbytes(self, n: int, start: int) -> int:
        """Of a prompt of n tokens, what a target lacks that has what grows with the first ones."""
        growing_nbytes = self.growing_nbytes or self.nbytes
        return self.nbytes(n) - growing_nbytes(start)

    @property
    def pairs(self) -> list[tuple[Shape, Shape]]:
        return [(source, target) for source in self.sources for target in self.targets]


def v4_nbytes(n: int) -> int:
    """4 layers with a window of 12, 2 of them with blocks of 4 and an indexer, 1 with blocks of 16;
    rows of 32 and 16."""
    sparse_tail = n - max(0, n // 4 * 4 - 4)
    return 4 * (
        4 * 32 * min(n, 11)
        + 2 * (32 + 16) * (n // 4)
        + 2 * 4 * (32 + 16) * sparse_tail
        + 32 * (n // 16)
        + 2 * 32 * (n % 16)
    )


CASES = (
    # 3 layers, keys and values of 2 heads of 8, fp32.
    Case("llama", lambda n: n * 3 * 2 * 2 * 8 * 4),
    # One row of 32 + 16 for all heads.
    Case("deepseek_v3", lambda n: n * 3 * (32 + 16) * 4),
    # As above, and an index key of 32; 24 tokens are chosen.
    Case("deepseek_v32", lambda n: n * 3 * (32 + 16 + 32) * 4, (1, 17, 23, 24, 25, 150), 32),
    # 2 of 4 layers share the choice of the one before.
    Case("glm_dsa", lambda n: n * (4 * (32 + 16) + 2 * 32) * 4, (1, 17, 23, 24, 25, 150), 32),
    # Ends of blocks, of the window and of pages, and behind them. Stages with every kind of layer
    # alone, pages of less than a block and of several.
    Case(
        "deepseek_v4",
        v4_nbytes,
        (3, 4, 13, 65, 150),
        output_count=36,
        sources=(Shape(pp_size=4, page_size=8, chunk=40, layer_group_count=2),),
        growing_nbytes=lambda n: 4 * (2 * (32 + 16) * (n // 4) + 32 * (n // 16)),
    ),
    # 1 of 4 layers attends, 2 heads of 16. The others keep 3 inputs of 2 * 8 + 2 * 8 + 4 * 12
    # channels and 4 states of 8 * 12; 4 ranks share 2 key heads.
    Case(
        "qwen3_next",
        lambda n: n * 2 * 2 * 16 * 4 + 3 * (80 * 3 + 4 * 8 * 12) * 4,
        (1, 3, 16, 65, 150),
        output_count=32,
        targets=(Shape(page_size=4), Shape(tp_size=4, page_size=32)),
        growing_nbytes=lambda n: n * 2 * 2 * 16 * 4,
    ),
    Case(
        "qwen3_5",
        lambda n: n * 2 * 2 * 16 * 4 + 3 * (80 * 3 + 4 * 8 * 12) * 4,
        (2, 64, 150),
        growing_nbytes=lambda n: n * 2 * 2 * 16 * 4,
    ),
    # 1 of 3 layers has rows of 32 + 16. The others keep 3 inputs of 3 * 2 * 12 channels, and
    # 2 states of 12 * 12.
    Case(
        "kimi_linear",
        lambda n: n * (32 + 16) * 4 + 2 * (3 * 2 * 12 * 3 + 2 * 12 * 12) * 4,
        (1, 3, 65, 150),
        output_count=32,
        growing_nbytes=lambda n: n * (32 + 16) * 4,
    ),
    # As above, with 4 heads of 8.
    Case(
        "ling_3",
        lambda n: n * (32 + 16) * 4 + 2 * (3 * 4 * 8 * 3 + 4 * 8 * 8) * 4,
        (1, 3, 65, 150),
        output_count=32,
        targets=(Shape(page_size=4), Shape(tp_size=4, page_size=32)),
        growing_nbytes=lambda n: n * (32 + 16) * 4,
    ),
    # 2 of 4 layers have rows of 32 + 16, the others 4 states of 12 * 12.
    Case(
        "ling_2_5",
        lambda n: 2 * (n * (32 + 16) + 4 * 12 * 12) * 4,
        (1, 3, 65, 150),
        output_count=32,
        targets=(Shape(page_size=4), Shape(tp_size=4, page_size=32)),
        growing_nbytes=lambda n: 2 * n * (32 + 16) * 4,
    ),
    # 3 of 4 layers see 24 tokens.
    Case(
        "gemma3",
        lambda n: (n + 3 * min(n, 23)) * 2 * 2 * 16 * 4,
        (1, 15, 23, 24, 25, 64, 150),
        growing_nbytes=lambda n: n * 2 * 2 * 16 * 4,
    ),
    # Half of 4 layers see 24 tokens by 4 heads of 16, the others all by one of 32.
    Case(
        "gemma4",
        lambda n: (2 * n * 32 + 2 * min(n, 23) * 4 * 16) * 2 * 4,
        (1, 23, 24, 25, 150),
        output_count=40,
        growing_nbytes=lambda n: 2 * n * 32 * 2 * 4,
    ),
    # 8 layers, of which the last two own nothing; 2 of the others see everything.
    Case(
        "gemma4_e",
        lambda n: (2 * n * 32 + 4 * min(n, 23) * 16) * 2 * 2 * 4,
        (1, 24, 70),
        output_count=32,
        sources=(Shape(tp_size=2, pp_size=2, page_size=8, chunk=40, layer_group_count=2),),
        targets=(Shape(page_size=32),),
        growing_nbytes=lambda n: 2 * n * 32 * 2 * 2 * 4,
    ),
    # 2 of 3 layers see 8 tokens, less than most pages have.
    Case(
        "gpt_oss",
        lambda n: (n + 2 * min(n, 7)) * 2 * 2 * 16 * 4,
        (1, 7, 8, 17, 65, 150),
        24,
        growing_nbytes=lambda n: n * 2 * 2 * 16 * 4,
    ),
    # Keys and values of 2 heads of 8 on one layer, two slots: 3 inputs of 8 * 16 channels and of B
    # and C, 2 groups of 8, and 8 states of 16 x 8. Groups and heads are fewer than 4 ranks.
    Case(
        "nemotron_h",
        lambda n: n * 2 * 2 * 8 * 4 + 2 * (3 * (128 + 2 * 2 * 8) + 8 * 16 * 8) * 4,
        (1, 3, 16, 65, 150),
        output_count=32,
        targets=(Shape(page_size=4), Shape(tp_size=4, pp_size=2, page_size=32)),
        growing_nbytes=lambda n: n * 2 * 2 * 8 * 4,
    ),
    # All of that on 2 layers: 8 heads of 12, 1 group, which both ranks normalise together.
    Case(
        "falcon_h1",
        lambda n: 2 * (n * 2 * 2 * 8 + 3 * (96 + 2 * 8) + 8 * 12 * 8) * 4,
        (1, 3, 16, 65, 150),
        output_count=32,
        growing_nbytes=lambda n: 2 * n * 2 * 2 * 8 * 4,
    ),
)
