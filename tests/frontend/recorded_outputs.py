"""Whole outputs as models of each family write them, with what is said in them.

Written down from the models' own chat templates and from SGLang's and vLLM's documentation of their
parsers.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.frontend.bodies.fields import JsonObject

TOOLS: dict[str, JsonObject] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": ["boolean", "null"]},
            "parts": {"$ref": "#/$defs/parts"},
        },
        "$defs": {"parts": {"type": "array", "items": {"type": "string"}}},
    },
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {}}},
    "now": {"type": "object", "properties": {}},
}


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """said: text, `Thought`, or (name, arguments). is_inside: the prompt has opened reasoning."""

    name: str
    calls: str
    reasoning: str
    text: str
    said: tuple[object, ...]
    is_inside: bool = False


OSLO = ("get_weather", {"city": "Oslo"})
BONN = ("get_weather", {"city": "Bonn", "days": 3})
ADD = ("add", {"a": 1, "b": [2, {"c": '}"]é'}]})
ADD_JSON = '{"a": 1, "b": [2, {"c": "}\\"]é"}]}'
NOW = ("now", {})

RECORDED: tuple[Recorded, ...] = (
    # ---- JSON objects with the name inside ----
    Recorded(
        "hermes, thinking first", "hermes", "qwen3",
        "<think>\nThe user asks for Oslo.\n</think>\n\nLet me look.\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n<tool_call>\n'
        f'{{"name": "add", "arguments": {ADD_JSON}}}\n</tool_call>',
        (Thought("The user asks for Oslo."), "Let me look.", OSLO, ADD),
    ),
    Recorded(
        "hermes, not thinking", "hermes", "qwen3",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', (NOW,),
    ),
    Recorded(
        "hermes, a tag inside a string", "hermes", "",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a</tool_call>b"}}</tool_call>'
        " ok",
        (("get_weather", {"city": "a</tool_call>b"}), "ok"),
    ),
    Recorded(
        "hermes, a call that nothing reads, then one", "hermes", "",
        '<tool_call>{not json</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        ("<tool_call>{not json</tool_call>", NOW),
    ),
    Recorded(
        "hermes, a string without end, then a call", "hermes", "",
        'I look. <tool_call>{"name": "now</tool_call> <tool_call>{"name": "now"}</tool_call>',
        ('I look. <tool_call>{"name": "now</tool_call>', NOW),
    ),
    Recorded(
        "hermes, thoughts never closed", "hermes", "qwen3",
        'Oslo, so\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n'
        "</tool_call>",
        (Thought("Oslo, so"), OSLO), is_inside=True,
    ),
    Recorded(
        "hermes, thoughts about tags", "hermes", "qwen3",
        "I write <tool_call> for a call.</think>It is a <tool_call> tag.",
        (Thought("I write <tool_call> for a call."), "It is a <tool_call> tag."), is_inside=True,
    ),
    Recorded(
        "llama, bare objects", "llama3", "",
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}; '
        f'{{"name": "add", "parameters": {ADD_JSON}}}', (OSLO, ADD),
    ),
    Recorded(
        "llama, behind its tag", "llama3", "",
        'Sure.<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        ("Sure.", OSLO),
    ),
    Recorded("llama, text", "llama3", "", "It is {warm} here.", ("It is {warm} here.",)),
    Recorded(
        "mistral, a list", "mistral", "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
        f'{{"name": "add", "arguments": {ADD_JSON}}}]', (OSLO, ADD),
    ),
    Recorded(
        "mistral, names before objects", "mistral", "mistral",
        '[THINK]Two calls.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}'
        f"[TOOL_CALLS]add{ADD_JSON}", (Thought("Two calls."), "I look.", OSLO, ADD),
    ),
    Recorded(
        "nemotron, a list between tags", "nemotron_json", "nemotron_3",
        "Weather.\n</think>\n<TOOLCALL>"
        '[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>\n',
        (Thought("Weather."), OSLO), is_inside=True,
    ),
    Recorded(
        "ling, as hermes", "hermes", "qwen3",
        "<think>\n\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>', (OSLO,),
    ),
    # ---- a name, then JSON ----
    Recorded(
        "deepseek v3", "deepseekv3", "deepseek-v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        f"<｜tool▁sep｜>add\n```json\n{ADD_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("I look.", OSLO, ADD),
    ),
    Recorded(
        "deepseek r1, thoughts that nothing opens", "deepseekv3", "deepseek-r1",
        "Hm.\n</think>\n\n42", (Thought("Hm."), "42"), is_inside=True,
    ),
    Recorded(
        "deepseek v3.1", "deepseekv31", "deepseek-v3",
        "Oslo.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (Thought("Oslo."), "I look.", OSLO, NOW), is_inside=True,
    ),
    Recorded(
        "kimi", "kimi_k2", "kimi_k2",
        "<think>Two.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>"
        'functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
        f"<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{ADD_JSON}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        (Thought("Two."), "I look.", OSLO, ADD),
    ),
    Recorded(
        "harmony, a call", "gpt-oss", "gpt-oss",
        "<|channel|>analysis<|message|>Need Oslo.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}',
        (Thought("Need Oslo."), OSLO),
    ),
    Recorded(
        "harmony, the recipient first", "gpt-oss", "gpt-oss",
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant to=functions.now"
        "<|channel|>commentary json<|message|>{}<|call|>",
        (Thought("Need it."), NOW),
    ),
    Recorded(
        "harmony, an answer", "gpt-oss", "gpt-oss",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is 4.", (Thought("Easy."), "It is 4."),
    ),
    Recorded(
        "harmony, thoughts that are not ended", "gpt-oss", "gpt-oss",
        "<|channel|>analysis<|message|>A.<|channel|>analysis<|message|>B.<|channel|>final<|message|>"
        "4.", (Thought("A.B."), "4."),
    ),
    Recorded(
        "harmony, words before a call", "gpt-oss", "gpt-oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        ("I look.", OSLO),
    ),
    # ---- parameters between tags ----
    Recorded(
        "qwen coder", "qwen3_coder", "qwen3",
        "<think>\nBonn.\n</think>\n\nI look.\n\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (Thought("Bonn."), "I look.", BONN, NOW),
    ),
    Recorded(
        "qwen coder, types by schema", "qwen3_coder", "",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n<parameter=parts>\n['a', \"b\"]\n</parameter>\n"
        "</function>\n</tool_call>",
        (("get_weather", {"city": "12", "exact": True, "parts": ["a", "b"]}),),
    ),
    Recorded(
        "qwen coder, without the outer tags", "qwen3_coder", "",
        "Now.\n<function=now>\n</function>", ("Now.", NOW),
    ),
    Recorded(
        "qwen coder, tags inside a value", "qwen3_coder", "",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\na</function>\n</tool_call>b\n"
        "</parameter>\n</function>\n</tool_call>",
        (("get_weather", {"city": "a</function>\n</tool_call>b"}),),
    ),
    Recorded(
        "nemotron 3, as qwen coder", "qwen3_coder", "nemotron_3",
        "Bonn.\n</think>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n",
        (Thought("Bonn."), BONN), is_inside=True,
    ),
    Recorded(
        "glm 4.5", "glm45", "glm45",
        "\n<think>Bonn, three days.</think>\nI look.\n<tool_call>get_weather\n"
        "<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        (Thought("Bonn, three days."), "I look.", BONN),
    ),
    Recorded(
        "glm 4.7, on one line", "glm47", "glm45",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>"
        '[2, {"c": "}\\"]é"}]</arg_value></tool_call><tool_call>now</tool_call>', (ADD, NOW),
    ),
    Recorded(
        "deepseek v3.2", "deepseekv32", "deepseek-v3",
        'Bonn.</think>I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Bonn</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        (Thought("Bonn."), "I look.", BONN, NOW), is_inside=True,
    ),
    Recorded(
        "deepseek v4, with JSON", "deepseekv4", "deepseek-v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n'
        f"{ADD_JSON}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>", (ADD,),
    ),
    # ---- as Python, and with bare keys ----
    Recorded(
        "pythonic", "pythonic", "",
        "[get_weather(city='Oslo'), add(a=1, b=[2, {'c': '}\"]é'}]), now()]", (OSLO, ADD, NOW),
    ),
    Recorded(
        "pythonic, between tags", "llama4_pythonic", "",
        '<|python_start|>[get_weather(city="Bonn", days=3)]<|python_end|>', (BONN,),
    ),
    Recorded("pythonic, text", "pythonic", "", "[1] says (so).", ("[1] says (so).",)),
    Recorded(
        "gemma", "gemma4", "gemma4",
        "<|channel>thought\nBonn.<channel|><|tool_call>call:get_weather{city:<|\"|>Bonn<|\"|>,"
        "days:3}<tool_call|><|tool_call>call:add{a:1,b:[2,{c:<|\"|>}\"]é<|\"|>}]}<tool_call|>",
        (Thought("Bonn."), BONN, ADD),
    ),
    # ---- none ----
    Recorded("no such tool", "hermes", "", "x <tool_call>{\"name\": \"rm\"}</tool_call> y",
             ('x <tool_call>{"name": "rm"}</tool_call> y',)),
    Recorded("text with a tag later on", "", "qwen3", "a <think> tag  ", ("a <think> tag  ",)),
    Recorded("cut off in a thought", "", "qwen3", "<think>Well", (Thought("Well"),)),
    Recorded("cut off in a parameter", "qwen3_coder", "",
             "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",
             ("<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",)),
    Recorded("nothing", "hermes", "qwen3", "", ()),
)  # fmt: skip
