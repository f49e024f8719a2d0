"""What a bug is that is planted into the real cores, to see that the stories find it.

Each is a small change of one method, of a kind that is easily written by mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Mutation:
    """found_by: a seed whose story fails with it, as long as nothing else changes.

    has_claims: whether its stories have priorities and keys. has_proposals: whether they verify
    proposals, all of them. Others' have none, so that their seeds stay.
    """

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    found_by: int
    has_claims: bool = False
    has_proposals: bool = False
