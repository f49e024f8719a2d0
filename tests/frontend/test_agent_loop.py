"""An agent's loop as LangChain runs it: a call, its result, and an answer that knows both.

LangChain sends the message of a call with `content: null`. Skips where it is not installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from common.request import FinishKind, FinishReason
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import TOKENIZER, run_generate, say_text

langchain_openai = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")

pytestmark = pytest.mark.slow
STOP = FinishReason(FinishKind.STOP)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
# As most templates are, it takes content for text; it shows calls as Qwen's does.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls %}{{ '\\n<tool_call>' + c.function.name }}"
    "{{ c.function.arguments | tojson }}{{ '</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_langchain_gets_its_call_and_its_result_reaches_the_model(
    is_streaming: bool, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        chat = langchain_openai.ChatOpenAI(
            model="tiny",
            base_url="http://localhost/v1",
            api_key="any",
            http_async_client=rig.http,
            streaming=is_streaming,
            max_retries=0,
        ).bind_tools([TOOL])
        rig.scheduler.answer = say_text(f"<think>\nOslo.\n</think>\n\n{CALL}", STOP)
        asked = [messages.HumanMessage("How is it in Oslo?")]
        called = await chat.ainvoke(asked)
        (call,) = called.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
        assert called.content == "" and called.response_metadata["finish_reason"] == "tool_calls"

        rig.scheduler.answer = say_text("It is 4 degrees.", STOP)
        result = messages.ToolMessage("4", tool_call_id=call["id"])
        answer = await chat.ainvoke([*asked, called, result])
        assert answer.content == "It is 4 degrees."
        prompt = TOKENIZER.decode(rig.scheduler.submits[-1].token_ids, skip_special_tokens=False)
        shown = '<tool_call>get_weather{"city": "Oslo"}</tool_call><|im_end|>\n'
        assert f"<|im_start|>assistant\n\n{shown}" in prompt
        assert "<|im_start|>tool\n4<|im_end|>" in prompt

    run_generate(
        tmp_path,
        story,
        chat_template=TEMPLATE,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
