"""What each client sends, request after request: drawn from a seed, never from what happens.

Knows nothing of sockets or of time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.soak.golden import Golden

JsonObject = dict[str, object]


class Twist(StrEnum):
    """What is unusual about a request."""

    NONE = "none"
    ABORT = "abort"
    DISCONNECT = "disconnect"
    BAD = "bad"
    SAMPLED = "sampled"


class Side(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Api(StrEnum):
    GENERATE = "/generate"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the requests, 0 to 1: that ask for SAMPLE_COUNT samples; that are a next turn."""

    samples: float = 0.0
    turns: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One request.

    sample_count: answers that are asked for. is_turn: whether its prompt goes on from an answer.
    sides: posted to, in this order, gap_s apart; both for a request as a router sends it.
    twisted_sides: where it is aborted or disconnected, after_s from the post or, for a streamed
    disconnect, after after_events events. think_s: pause before it.
    bad_statuses: what a bad request may be answered.
    """

    rid: str
    golden: Golden
    is_turn: bool
    sample_count: int
    api: Api
    is_streaming: bool
    sides: tuple[Side, ...]
    twist: Twist
    twisted_sides: tuple[Side, ...]
    after_s: float
    after_events: int
    gap_s: float
    think_s: float
    room: int
    sampling_seed: int
    flaw: JsonObject
    bad_statuses: tuple[int, ...] = (400,)

    @property
    def is_routed(self) -> bool:
        return len(self.sides) > 1

    def __str__(self) -> str:
        """For people who look for the request in the logs."""
        words = [
            f"{self.rid} {self.api}",
            "routed" if self.is_routed else "plain",
            "streamed" if self.is_streaming else "whole",
            f"{self.sample_count} samples" if self.sample_count > 1 else "",
            "next turn" if self.is_turn else "",
            "" if self.twist is Twist.NONE else f"{self.twist} {'+'.join(self.twisted_sides)}",
        ]
        return ", ".join(word.strip() for word in words if word)

    def body(self, bootstrap: tuple[str, int]) -> JsonObject:
        """The JSON body, the same for both sides. bootstrap: the prefill server's host and port."""
        prompt = self.golden.prompt
        temperature = 1.0 if self.twist is Twist.SAMPLED else 0.0
        limits: JsonObject = {"temperature": temperature, "seed": self.sampling_seed}
        if self.sample_count > 1:
            limits["n"] = self.sample_count
        body: JsonObject = {"rid": self.rid, "stream": self.is_streaming}
        match self.api:
            case Api.GENERATE:
                body["text" if isinstance(prompt.content, str) else "input_ids"] = prompt.content
                limits["sampling_seed"] = limits.pop("seed")
                body["sampling_params"] = {**limits, "max_new_tokens": prompt.max_new_tokens}
            case Api.COMPLETIONS:
                body |= {"prompt": prompt.content, "max_tokens": prompt.max_new_tokens, **limits}
        if self.is_routed:
            body |= {
                "bootstrap_host": bootstrap[0],
                "bootstrap_port": bootstrap[1],
                "bootstrap_room": self.room,
            }
        return body | self.flaw


# Top-level keys that make a good body bad, and the statuses it deserves then.
FLAWS: dict[Api, tuple[tuple[JsonObject, tuple[int, ...]], ...]] = {
    Api.GENERATE: (
        ({"input_ids": [], "text": None}, (400,)),
        ({"input_ids": [5, 1 << 40], "text": None}, (400,)),
        ({"input_ids": [5] * 4000, "text": None}, (400,)),
        ({"text": "both", "input_ids": [5]}, (400,)),
        ({"sampling_params": {"temperature": -1}}, (400,)),
        ({"sampling_params": {"max_new_tokens": "many"}}, (400,)),
        ({"sampling_params": {"top_p": 7}}, (400,)),
        ({"stream": "perhaps"}, (400,)),
        ({"rid": 17}, (400,)),
    ),
    Api.COMPLETIONS: (
        ({"prompt": []}, (400,)),
        ({"prompt": None}, (400,)),
        ({"prompt": [-1]}, (400,)),
        ({"max_tokens": 0}, (400,)),
        ({"temperature": "warm"}, (400,)),
        ({"model": "no-such-model"}, (404,)),
        ({"n": 100000}, (400,)),
    ),
}
TWIST_WEIGHTS = {
    Twist.NONE: 66,
    Twist.ABORT: 10,
    Twist.DISCONNECT: 10,
    Twist.BAD: 6,
    Twist.SAMPLED: 8,
}
SAMPLE_COUNT = 3
ROUTED_SHARE = 0.3
THINK_MAX_S = 0.05
GAP_MAX_S = 0.05
# From "before anything happened" to "after most answers are complete".
TWIST_DELAYS_S = (0.0, 0.002, 0.01, 0.05, 0.2, 0.6)


NO_MIX = Mix()


def draw_plans(
    seed: int, client_index: int, goldens: Sequence[Golden], mix: Mix = NO_MIX
) -> Iterator[Plan]:
    """The endless sequence of one client's requests."""
    rng = random.Random(f"client {seed} {client_index}")
    # Rooms of a client begin at a place of their own; a room is used once.
    room = rng.getrandbits(30) << 32
    number = 0
    golden = goldens[0]
    while True:
        number += 1
        turn = _draw_turn(rng, goldens, golden) if rng.random() < mix.turns else None
        golden = turn or rng.choice(goldens)
        # The end mark keeps one name from being the beginning of another, which an abort matches.
        rid = f"{client_index}-{number}."
        yield _draw(rng, rid, room + number, golden, mix, is_turn=turn is not None)


def _draw_turn(rng: random.Random, goldens: Sequence[Golden], before: Golden) -> Golden | None:
    """A next turn: half of them at once after `before`, the others when its cache may have gone."""
    return (before if rng.random() < 0.5 else rng.choice(goldens)).next_turn


def _draw(
    rng: random.Random, rid: str, room: int, golden: Golden, mix: Mix, *, is_turn: bool
) -> Plan:
    twist = rng.choices(list(TWIST_WEIGHTS), list(TWIST_WEIGHTS.values()))[0]
    api = rng.choice((Api.GENERATE, Api.GENERATE, Api.COMPLETIONS))
    is_routed = rng.random() < ROUTED_SHARE and twist is not Twist.BAD
    sides: tuple[Side, ...] = (Side.DECODE,)
    if is_routed:
        sides = rng.choice(((Side.PREFILL, Side.DECODE), (Side.DECODE, Side.PREFILL)))
    twisted = rng.choice((sides, sides, (Side.DECODE,), (Side.PREFILL,))) if is_routed else sides
    flaw, statuses = rng.choice(FLAWS[api])
    has_samples = rng.random() < mix.samples and twist is not Twist.BAD
    return Plan(
        rid=rid,
        golden=golden,
        is_turn=is_turn,
        sample_count=SAMPLE_COUNT if has_samples else 1,
        api=api,
        is_streaming=rng.random() < 0.5,
        sides=sides,
        twist=twist,
        twisted_sides=twisted if twist in (Twist.ABORT, Twist.DISCONNECT) else (),
        after_s=rng.choice(TWIST_DELAYS_S),
        after_events=rng.randint(1, 8),
        gap_s=rng.random() * GAP_MAX_S,
        think_s=rng.random() * THINK_MAX_S,
        room=room,
        sampling_seed=rng.getrandbits(31),
        flaw=flaw if twist is Twist.BAD else {},
        bad_statuses=statuses,
    )
