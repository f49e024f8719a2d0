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
