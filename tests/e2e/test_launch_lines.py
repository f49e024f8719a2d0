"""A pair of which one server is started by SGLang's documented line and the other by vLLM's."""

from __future__ import annotations

import pytest

from common.flags.foreign import foreign_flags_of
from tests.common.launch_lines import SGLANG_PREFILL, VLLM_DECODE, Line
from tests.e2e.fleet import Fleet, Node

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def flags_of(line: Line) -> list[str]:
    """Without the checkpoint and the port, which are a test's own."""
    words = [word for word in line.words if word not in ("--model-path", "DIR")]
    for name in ("--port", "--prefill"):
        if name in words:
            at = words.index(name)
            del words[at : at + 2]
    return words


@pytest.fixture(scope="module")
def pair(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> tuple[Node, Node]:
    """On the device that there is, with a template of another server's."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    more = ("--device", "auto", "--chat-template", str(template))
    prefill = fleet.prefill(*flags_of(SGLANG_PREFILL), *more)
    decode = fleet.decode([prefill], *flags_of(VLLM_DECODE), *more)
    return prefill.wait_ready(), decode.wait_ready()


def test_a_request_crosses_the_pair(pair: tuple[Node, Node]) -> None:
    reply = pair[1].generate({"text": "Selma keeps the", "sampling_params": {"max_new_tokens": 4}})
    assert len(reply.output_ids) == 4
    pair[0].wait_counted("finished", 1)


@pytest.mark.parametrize(("index", "line"), [(0, SGLANG_PREFILL), (1, VLLM_DECODE)])
def test_what_changes_nothing_is_one_line_in_the_log(
    pair: tuple[Node, Node], index: int, line: Line
) -> None:
    log = pair[index].log
    for begin in line.remarks:
        name = begin.split()[0].removeprefix("--")
        answer = foreign_flags_of(line.role)[name].row.answer
        (said,) = [text for text in log.splitlines() if f" {begin}" in text]
        assert said.endswith(f" changes nothing here: {answer}")
    (device,) = [text for text in log.splitlines() if "--device auto is " in text]
    assert "worker-0" in device


def test_messages_go_through_the_named_template(pair: tuple[Node, Node]) -> None:
    for node in pair:
        body = {"messages": [{"role": "user", "content": "ring"}], "add_generation_prompt": False}
        tokens = node.post("/tokenize", body).json()["tokens"]
        assert tokens == node.post("/tokenize", {"prompt": "<user>ring"}).json()["tokens"]
