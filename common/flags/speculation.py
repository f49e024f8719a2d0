"""Flags of speculation: what proposes tokens ahead of a sequence, and how many."""

from __future__ import annotations

from common.flags.flag import Flag
from common.flags.values import choice, integer, number
from common.request_bounds import PROPOSAL_COUNT_MAX
from common.speculative import DEFAULT_PROPOSAL_MAX, SpeculativeAlgorithm

SPECULATION: tuple[Flag, ...] = (
    Flag(
        "speculative_algorithm",
        ("speculative-algorithm",),
        "{" + ",".join(filter(None, SpeculativeAlgorithm)) + "}",
        choice(*filter(None, SpeculativeAlgorithm)),
        "verify several tokens in a step, proposed by NGRAM: where the latest ones stood before; "
        "by NEXTN: the checkpoint's layer for that; or by EAGLE3: a head with files of its own. "
        "The last two have a cache, so a pair needs them on both sides [one token in a step]",
    ),
    Flag(
        "speculative_draft_model_path",
        ("speculative-draft-model-path",),
        "DIR",
        str,
        "checkpoint directory of an EAGLE3 head [none]",
    ),
    Flag(
        "speculative_num_steps",
        ("speculative-num-steps",),
        "N",
        integer(1, PROPOSAL_COUNT_MAX),
        f"tokens proposed ahead of a sequence [{DEFAULT_PROPOSAL_MAX}]",
    ),
    Flag(
        "speculative_num_draft_tokens",
        ("speculative-num-draft-tokens",),
        "N",
        integer(2, PROPOSAL_COUNT_MAX + 1),
        "tokens of a sequence that a step verifies, one more than proposed "
        "[--speculative-num-steps + 1]",
    ),
    Flag(
        "speculative_eagle_topk",
        ("speculative-eagle-topk",),
        "N",
        integer(1, 1),
        "branches of proposals: one",
    ),
    Flag(
        "speculative_draft_p_min",
        ("speculative-draft-p-min",),
        "P",
        number(0.0, 1.0),
        "a draft guesses on as long as all of its guesses are right with this probability, as it "
        "has it itself",
    ),
)
