"""How models write reasoning and calls: the formats of all families, as data.

`signs`: what stands in the chat template of a model that writes so. Of several formats that fit,
the first one in the table is chosen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.frontend.text.parsing.bodies import (
    AnyOf,
    Keyed,
    Named,
    Objects,
    Parameters,
    Pythonic,
)
from common.frontend.text.parsing.form import CallFormat, CallIds, ReasoningFormat, WrittenCall
from common.frontend.text.parsing.listed import ListFormat


@dataclass(frozen=True, slots=True)
class Signs:
    """What tells that a model writes so: all of these parts of its template, or its architecture,
    if it has no template."""

    template: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()


SPARSE_DEEPSEEK = ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM")
NAME = r"(?P<name>[\w.-]+)"

# ---- calls ---------------------------------------------------------------------------------------

OBJECT_LIST = ListFormat(Objects(), between=" \t\r\n,;[]", starts="{".__eq__)
LISTED = CallFormat(listed=OBJECT_LIST)
"""What a required call is forced to be, whatever the model was trained on."""

HERMES = CallFormat(
    openings=("<tool_call>",),
    closings=("</tool_call>",),
    body=Objects(),
    written=WrittenCall('\n{"name": "{name}", "arguments": ', "}\n</tool_call>"),
)

# The outer tags are now and then left out.
QWEN_CODER = CallFormat(
    openings=("<tool_call>\n<function=", "<tool_call><function=", "<function=", "<tool_call>"),
    closings=(
        "</function>\n</tool_call>",
        "</function></tool_call>",
        "</function>",
        "</tool_call>",
    ),
    body=AnyOf(
        (
            Parameters(
                header=re.compile(rf"{NAME}>\s*"),
                opening=re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>"),
                closing="</parameter>",
                has_lines=True,
            ),
            Objects(),
        )
    ),
    passed=("</tool_call>",),
)

GLM = CallFormat(
    openings=("<tool_call>",),
    closings=("</tool_call>",),
    body=AnyOf(
        (
            Parameters(
                header=re.compile(rf"\s*{NAME}\s*"),
                opening=re.compile(r"\s*<arg_key>\s*(?P<key>[^<]+?)\s*</arg_key>\s*<arg_value>"),
                closing="</arg_value>",
            ),
            Objects(),
        )
    ),
    inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


def _deepseek(written: WrittenCall) -> CallFormat:
    """V3 and V3.1 read both of their ways; a grammar has to know which."""
    return CallFormat(
        openings=("<｜tool▁call▁begin｜>",),
        closings=("<｜tool▁call▁end｜>",),
        body=AnyOf(
            (
                Named(re.compile(rf"\s*function<｜tool▁sep｜>\s*{NAME}\s*```(?:json)?\s*"), "```"),
                Named(re.compile(rf"\s*{NAME}\s*<｜tool▁sep｜>\s*")),
            )
        ),
        passed=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        written=written,
    )


DEEPSEEK_V3 = _deepseek(
    WrittenCall("function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>")
)
DEEPSEEK_V31 = _deepseek(WrittenCall("{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"))

_INVOKED = re.compile(rf'\s*"{NAME}"\s*>\s*')
DSML = CallFormat(
    openings=("<｜DSML｜invoke name=",),
    closings=("</｜DSML｜invoke>",),
    body=AnyOf(
        (
            Parameters(
                header=_INVOKED,
                opening=re.compile(
                    r'\s*<｜DSML｜parameter\s+name="(?P<key>[^"]+)"\s+'
                    r'string="(?P<is_string>true|false)"\s*>'
                ),
                closing="</｜DSML｜parameter>",
            ),
            Named(_INVOKED),
        )
    ),
    passed=(
        "<｜DSML｜function_calls>", "</｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>",
    ),
)  # fmt: skip

KIMI = CallFormat(
    openings=("<|tool_call_begin|>",),
    closings=("<|tool_call_end|>",),
    body=Named(re.compile(rf"\s*(?:functions\.)?{NAME}:\d+\s*<\|tool_call_argument_begin\|>\s*")),
    passed=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ids=CallIds.NUMBERED,
    written=WrittenCall(
        "functions.{name}:{index}<|tool_call_argument_begin|>", "<|tool_call_end|>"
    ),
)

# Older models write a list of objects, newer ones a name before each object.
MISTRAL = CallFormat(
    openings=("[TOOL_CALLS]",),
    body=AnyOf(
        (
            Objects(),
            Named(re.compile(rf"\s*{NAME}\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?={{)")),
        )
    ),
    inner=("[CALL_ID]", "[ARGS]"),
    ids=CallIds.NINE_CHARACTERS,
)

NEMOTRON = CallFormat(
    openings=("<TOOLCALL>",),
    closings=("</TOOLCALL>",),
    body=Objects(),
    written=WrittenCall('[{"name": "{name}", "arguments": ', "}]</TOOLCALL>"),
)

GEMMA = CallFormat(
    openings=("<|tool_call>",),
    closings=("<tool_call|>",),
    body=Keyed(re.compile(rf"\s*call:{NAME}\s*(?=\{{)")),
    inner=('<|"|>',),
)

LLAMA_JSON = CallFormat(openings=("<|python_tag|>",), listed=OBJECT_LIST)

PYTHONIC = CallFormat(
    openings=("<|python_start|>",),
    listed=ListFormat(
        Pythonic(), between=" \t\r\n,[]", starts=str.isidentifier, quotes="\"'", lead="["
    ),
    passed=("<|python_end|>",),
)

# A header names channel and recipient, in either order, and the type of what follows.
HARMONY = CallFormat(
    openings=(
        "<|start|>assistant to=", "<|channel|>commentary to=", "<|channel|>analysis to=",
        " to=functions.",
    ),
    closings=("<|call|>", "<|end|>", "<|return|>"),
    body=Named(re.compile(rf"(?:functions\.)?{NAME}[^{{]*?<\|message\|>\s*")),
    inner=("<|channel|>", "<|constrain|>", "<|message|>"),
)  # fmt: skip

CALL_FORMATS: dict[str, tuple[CallFormat, Signs]] = {
    "deepseekv32": (DSML, Signs(("｜DSML｜",), SPARSE_DEEPSEEK)),
    "deepseekv3": (DEEPSEEK_V3, Signs(("<｜tool▁calls▁begin｜>", "```json"))),
    "deepseekv31": (DEEPSEEK_V31, Signs(("<｜tool▁calls▁begin｜>",))),
    "kimi_k2": (KIMI, Signs(("<|tool_call_begin|>",))),
    "gpt-oss": (HARMONY, Signs(("<|channel|>", "<|call|>"))),
    "glm45": (GLM, Signs(("<arg_key>",))),
    "qwen3_coder": (QWEN_CODER, Signs(("<function=", "<parameter="))),
    "nemotron_json": (NEMOTRON, Signs(("<TOOLCALL>",))),
    "gemma4": (GEMMA, Signs(("<|tool_call>",))),
    "mistral": (MISTRAL, Signs(("[TOOL_CALLS]",))),
    "hermes": (HERMES, Signs(("<tool_call>",))),
    "pythonic": (PYTHONIC, Signs(("[func_name1(params_name1",))),
    "llama3": (LLAMA_JSON, Signs(('{"name": function name',))),
}

# ---- reasoning -----------------------------------------------------------------------------------

THINK = ReasoningFormat("<think>", "</think>")
ALWAYS_THINK = ReasoningFormat("<think>", "</think>", is_implied=True)
GEMMA_THOUGHT = ReasoningFormat("<|channel>thought\n", "<channel|>")
HARMONY_ANALYSIS = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    is_anywhere=True,
    ends=("<|start|>", "<|channel|>", "<|return|>"),
    passed=(
        "<|start|>assistant", "<|start|>", "<|channel|>final", "<|channel|>commentary",
        "<|channel|>analysis", " <|constrain|>json", "<|constrain|>json", "<|message|>", "<|end|>",
        "<|return|>", "<|call|>",
    ),
    introduction="<|channel|>final<|message|>",
    next_message="<|start|>assistant",
)  # fmt: skip

REASONING_FORMATS: dict[str, tuple[ReasoningFormat, Signs]] = {
    "gpt-oss": (HARMONY_ANALYSIS, Signs(("<|channel|>", "<|call|>"))),
    "gemma4": (GEMMA_THOUGHT, Signs(("<|channel>",))),
    "mistral": (ReasoningFormat("[THINK]", "[/THINK]"), Signs(("[THINK]",))),
    "qwen3": (THINK, Signs(("</think>",), SPARSE_DEEPSEEK)),
    "deepseek-r1": (ALWAYS_THINK, Signs()),
}
