"""Whether the soak sees that one of several samples is wrong, and takes right ones for right."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.soak.golden import Golden, Prompt
from tests.soak.plans import Api, Mix, Plan, Side, Twist, draw_plans
from tests.soak.verdicts import Half, Verdict, judge

RIGHT = Golden(Prompt("Facts:", 3), [5, 6, 7], " the key.", "stop", None)
WRONG_IDS = [5, 6, 8]
COUNT = 3


def plan_of(api: Api, *, is_streaming: bool = False) -> Plan:
    """For the decode server, of several samples, untwisted."""
    plans = draw_plans(1, 0, [RIGHT], Mix(samples=1.0))
    plan = next(one for one in plans if one.sample_count > 1)
    return replace(
        plan, api=api, is_streaming=is_streaming, twist=Twist.NONE, twisted_sides=(),
        sides=(Side.DECODE,),
    )  # fmt: skip


def generated(ids: list[int], index: int | None = None) -> dict[str, object]:
    """A sample of /generate that has ended."""
    meta = {"finish_reason": {"type": "stop", "matched": 2}}
    place = {} if index is None else {"index": index}
    return {"text": RIGHT.text, "output_ids": ids, "meta_info": meta, **place}


def judge_bodies(plan: Plan, *bodies: object) -> Verdict:
    half = Half(plan.sample_count, status=200)
    for body in bodies:
        half.take(msgspec.json.encode(body), is_event=plan.is_streaming)
    return judge(plan, {Side.DECODE: half})[0]


def test_several_samples_are_right_only_if_each_is() -> None:
    plan = plan_of(Api.GENERATE)
    assert judge_bodies(plan, [generated(RIGHT.output_ids)] * COUNT) is Verdict.RIGHT
    for place in range(COUNT):
        body = [generated(RIGHT.output_ids) for _ in range(COUNT)]
        body[place] = generated(WRONG_IDS)
        assert judge_bodies(plan, body) is Verdict.WRONG


def test_each_streamed_sample_is_judged() -> None:
    plan = plan_of(Api.GENERATE, is_streaming=True)
    events = [generated(RIGHT.output_ids, index) for index in (2, 0, 1)]
    assert judge_bodies(plan, *events) is Verdict.RIGHT
    assert judge_bodies(plan, *events[:2], generated(WRONG_IDS, 1)) is Verdict.WRONG
    assert judge_bodies(plan, *events[:2]) is Verdict.WRONG, "one of them never came"


def test_each_choice_is_judged() -> None:
    plan = plan_of(Api.COMPLETIONS)
    choices = [{"index": i, "text": RIGHT.text, "finish_reason": "stop"} for i in range(COUNT)]
    assert judge_bodies(plan, {"choices": choices}) is Verdict.RIGHT
    other = {**choices[1], "text": " the lamp."}
    assert judge_bodies(plan, {"choices": [choices[0], other, choices[2]]}) is Verdict.WRONG


@pytest.mark.parametrize(
    "body",
    [
        generated(RIGHT.output_ids),
        [generated(RIGHT.output_ids)] * (COUNT - 1),
        {"choices": [{"index": 0, "text": RIGHT.text, "finish_reason": "stop"}]},
        {"choices": [{"index": i, "text": ""} for i in range(1, COUNT + 1)]},
    ],
)
def test_another_number_of_samples_has_no_known_shape(body: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        Half(COUNT).take(msgspec.json.encode(body), is_event=False)


def test_next_turns_are_drawn_where_the_mix_has_some() -> None:
    golden = replace(RIGHT, next_turn=RIGHT)
    plans = draw_plans(1, 0, [golden], Mix(turns=0.5))
    turns = [next(plans).is_turn for _ in range(200)]
    assert 0 < sum(turns) < len(turns)
    assert not any(plan.is_turn for plan, _ in zip(draw_plans(1, 0, [golden]), turns, strict=False))
