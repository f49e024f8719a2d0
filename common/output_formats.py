"""Names of the ways in which models write reasoning and calls of tools: SGLang's, then vLLM's.

The formats themselves are in `common/frontend/text/parsing/formats.py`.
"""

from __future__ import annotations

AUTO = "auto"
"""Whatever the checkpoint's chat template, or else its architecture, says."""

TOOL_FORMATS: dict[str, tuple[str, ...]] = {
    "deepseekv3": ("deepseek_v3",),
    "deepseekv31": ("deepseek_v31",),
    "deepseekv32": ("deepseek_v32", "deepseekv4", "deepseek_v4"),
    "gemma4": (),
    "glm45": ("glm47", "glm", "ling3"),
    "gpt-oss": ("openai",),
    "hermes": ("qwen", "qwen25"),
    "kimi_k2": (),
    "llama3": ("llama3_json", "llama4_json"),
    "mistral": (),
    "nemotron_json": (),
    "pythonic": ("llama4_pythonic",),
    "qwen3_coder": ("qwen3_xml",),
}
"""A format -> its other names."""

REASONING_FORMATS: dict[str, tuple[str, ...]] = {
    "deepseek-r1": ("deepseek_r1", "qwen3-thinking"),
    "gemma4": (),
    "gpt-oss": ("openai_gptoss",),
    "mistral": (),
    "qwen3": (
        "deepseek-v3", "deepseek_v3", "deepseek-v4", "deepseek_v4", "glm45", "kimi_k2",
        "nemotron_3", "nemotron_v3", "ling3",
    ),
}  # fmt: skip


def all_names(formats: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    return (AUTO, *formats, *(name for others in formats.values() for name in others))


def format_of(name: str, formats: dict[str, tuple[str, ...]]) -> str:
    """The format that has this name, which must be one of them."""
    return next(key for key, others in formats.items() if name == key or name in others)
