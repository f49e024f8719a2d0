"""Bugs of what waits for a frontend, planted into the real scheduler's end of the line to it.

Knows nothing of stories.
"""

from __future__ import annotations

import pytest

from common.protocol.frontend import Outputs, SchedulerToFrontend, Tokens
from common.protocol.joined_tokens import JoinedTokens
from common.runtime.undelivered import Undelivered
from tests.sim.planted import Mutation

Patch = pytest.MonkeyPatch


def only_the_newest_waits(patch: Patch) -> None:
    """As a queue that is full and drops: what a step says replaces what the one before said."""

    def add(self: JoinedTokens, message: Tokens) -> None:
        self._tokens = message

    patch.setattr(JoinedTokens, "add", add)


def a_failure_overtakes(patch: Patch) -> None:
    take = Undelivered.take

    def take_reversed(self: Undelivered) -> SchedulerToFrontend | None:
        message = take(self)
        return Outputs(message.items[::-1]) if isinstance(message, Outputs) else message

    patch.setattr(Undelivered, "take", take_reversed)


MUTATIONS = (
    Mutation("only-the-newest-output-waits", only_the_newest_waits, 5),
    Mutation("a-failure-overtakes-output", a_failure_overtakes, 9),
)
