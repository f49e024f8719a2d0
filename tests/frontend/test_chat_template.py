"""Templates that try to get out, or never to end: the client's 400, and nothing else happens."""

from __future__ import annotations

import pytest

from common.errors import RequestError
from common.frontend.bodies.fields import JsonObject
from common.frontend.text import chat_template
from common.frontend.text.chat_template import ChatTemplate

HELLO: JsonObject = {"role": "user", "content": "hello"}


def render(source: str, message: JsonObject = HELLO) -> str:
    template = ChatTemplate({"default": source}, {}, lambda: 0.0)
    return template.render(
        [message],
        tools=None,
        add_generation_prompt=False,
        continue_final_message=False,
        template_kwargs={"self": 1, "extra": "{{ 7 * 7 }}"},
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ strftime_now.__func__.__code__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ '%s'.__class__.format('{0.__class__}', 1).x }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages[0].content.nothing.at_all }}",
    ],
)
def test_what_a_template_may_not_do_is_400(source: str) -> None:
    message = dict(HELLO)
    with pytest.raises(RequestError, match="the chat template refuses the messages") as caught:
        render(source, message)
    assert caught.value.status == 400 and message == HELLO


def test_what_a_client_sends_is_text_and_no_template() -> None:
    found = render("{{ messages[0].content }}{{ extra }}", {"role": "user", "content": "{{ 1 }}"})
    assert found == "{{ 1 }}{{ 7 * 7 }}"


def test_a_text_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDERED_LENGTH_MAX", 5000)
    loops = "{% for a in range(9999) %}{% for b in range(9999) %}xy{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="more than 5000 characters"):
        render(loops)


# ---- messages that are calls and nothing else ----------------------------------------------------

CALL: JsonObject = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "now", "arguments": {"zone": "CET"}},
}
CALLED: JsonObject = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}
SHOWN_CALL = "{{ c.function.name }}({{ c.function.arguments | tojson }})"
# As published templates ask for content and calls: what each makes of a message without content.
STYLES: dict[str, str] = {
    "concatenated": "{{ 'A:' + m.content }}{% for c in m.tool_calls %}"
    + SHOWN_CALL
    + "{% endfor %}",
    "trimmed": (
        "A:{{ m['content'] | trim }}{% for c in m['tool_calls'] %}" + SHOWN_CALL + "{% endfor %}"
    ),
    "asked for as a string": (
        "{% if m.content is string %}{% set text = m.content %}{% else %}{% set text = '?' %}"
        "{% endif %}A:{{ text }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        + SHOWN_CALL
        + "{% endfor %}{% endif %}"
    ),
    "shown by a macro": (
        "{% macro visible(content) %}{% if content is string %}{{ content }}"
        "{% elif content is iterable and content is not mapping %}"
        "{% for p in content %}{{ p.text }}{% endfor %}"
        "{% else %}{{ content }}{% endif %}{% endmacro %}"
        "A:{{ visible(m.content) }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        + SHOWN_CALL
        + "{% endfor %}{% endif %}"
    ),
    "calls only where content is none": (
        "{% if m['content'] is none %}A:{% for c in m['tool_calls'] %}"
        + SHOWN_CALL
        + "{% endfor %}{% endif %}{% if m['content'] is not none %}A:{{ m['content'] }}{% endif %}"
    ),
    "none told apart by name": (
        "{% set content = m.content %}A:{% if content is not none %}{{ content }}{% endif %}"
        "{% if m.tool_calls is defined and m.tool_calls is not none %}{% for c in m.tool_calls %}"
        + SHOWN_CALL
        + "{% endfor %}{% endif %}"
    ),
    "asked for as a member": (
        "A:{% if 'tool_calls' in m %}{% for c in m.tool_calls %}" + SHOWN_CALL + "{% endfor %}"
        "{% elif 'content' in m %}{{ m.content }}{% endif %}"
        "{% if 'refusal' in m %}{{ m.refusal }}{% endif %}"
    ),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("has_null", [True, False])
def test_a_message_without_content_shows_its_calls_and_nothing_else(
    style: str, has_null: bool
) -> None:
    source = "{% for m in messages %}" + STYLES[style] + "{% endfor %}"
    absent = {key: value for key, value in CALLED.items() if key != "content"}
    found = render(source, CALLED if has_null else absent)
    assert found == 'A:now({"zone": "CET"})'


@pytest.mark.parametrize("style", STYLES)
def test_content_beside_calls_is_shown_as_it_is(style: str) -> None:
    source = "{% for m in messages %}" + STYLES[style] + "{% endfor %}"
    said = render(source, {"role": "assistant", "content": "Hm. "})
    assert said.strip() == "A:Hm."
