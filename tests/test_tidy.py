"""The rules of the house, held by a machine: who may import whom, and how large a room may be."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ("common", "prefill_server", "decode_server")
FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 70
TOP_LEVEL = {
    "prefill_server", "decode_server", "common", "deploy", "docs", "tests", "bench", "demo", ".ci",
    "pyproject.toml", "constraints.txt", "Makefile", "README.md", "ARCHITECTURE.md",
    "CONTRIBUTING.md", "SECURITY.md", "LICENSE", ".gitignore",
}  # fmt: skip

# Lower layers first; a package may import itself and what stands before it.
LAYERS = [
    {"common.config", "common.flags", "common.errors", "common.metrics",
     "common.log", "common.clock", "common.request", "common.request_bounds",
     "common.environment", "common.failures", "common.exit_codes", "common.config_checks",
     "common.config_keys", "common.output_formats", "common.weights", "common.speculative",
     "common.grammar", "common.stopped", "common.prefix_digests", "common.prefill_entries"},
    {"common.layout"},
    {"common.planner"},
    {"common.protocol"},
    {"common.scheduling"},
    {"common.engine", "common.transport", "common.channel"},
    {"common.worker", "common.transfers"},
    {"common.frontend", "common.runtime"},
    {"prefill_server", "decode_server", "common.admin"},
]  # fmt: skip

# One door per dependency: who may import it.
DOORS = {
    "torch": ("common/engine/", "common/worker/"),
    "zmq": ("common/channel/",),
    "fastapi": ("common/frontend/",),
    "starlette": ("common/frontend/",),
    "uvicorn": ("common/frontend/",),
    "h11": ("common/frontend/http/",),
    "prometheus_client": ("common/metrics/",),
    "opentelemetry": ("common/frontend/requests/tracing.py",),
    "safetensors": ("common/engine/",),
    "triton": ("common/engine/",),
    "llguidance": ("common/grammar.py",),
    "transformers": (),
    "time": ("common/clock.py",),
    "pickle": (),
}

# Words that are parts of no others; "ling" is looked for on its own.
FAMILIES = (
    "llama", "qwen", "mistral", "deepseek", "gemma", "kimi", "gpt_oss", "gpt-oss", "gptoss",
    "bailing", "nemotron", "falcon", "glm",
)  # fmt: skip


def python_files(*folders: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return [ROOT / name for name in listed if name.endswith(".py") and (ROOT / name).exists()]


def imports_of(path: Path) -> list[str]:
    """Modules that a file imports, functions' own imports and type-checking ones included."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
            modules += [f"{node.module}.{alias.name}" for alias in node.names]  # may be a module
    return modules


def layer_of(module: str) -> tuple[int, str] | None:
    for index, packages in enumerate(LAYERS):
        for package in packages:
            if module == package or module.startswith(package + "."):
                return index, package
    return None


@pytest.mark.parametrize("path", python_files(*CODE), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_go_down(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    own = layer_of(name)
    assert own is not None or name == "common.__init__", f"{name} is in none of the LAYERS"
    if own is None:
        return
    for module in imports_of(path):
        other = layer_of(module)
        is_ours = module.partition(".")[0] in CODE and module != "common"
        assert other is not None or not is_ours, f"{module} is in none of the LAYERS"
        if other is None or other[1] == own[1]:
            continue
        is_below = other[0] < own[0] or (other[0] == own[0] == 0)
        assert is_below, f"{path.relative_to(ROOT)} imports {module}, which is not below it"


@pytest.mark.parametrize("path", python_files(*CODE), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_dependency_has_one_door(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    for module in imports_of(path):
        doors = DOORS.get(module.partition(".")[0])
        if doors is not None:
            assert name.startswith(doors), f"{name} imports {module}: only {doors or 'nobody'} may"


@pytest.mark.parametrize("path", python_files(*CODE), ids=lambda p: str(p.relative_to(ROOT)))
def test_few_modules_read_the_environment(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    if name.startswith(("common/config", "common/environment", "common/flag")):
        return
    assert "os.environ" not in path.read_text() and "getenv" not in path.read_text()


@pytest.mark.parametrize(
    "path", python_files(*CODE, "demo", "bench"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_rooms_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= FILE_LINES_MAX
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            line_count = (node.end_lineno or node.lineno) - node.lineno + 1
            assert line_count <= FUNCTION_LINES_MAX, f"{node.name} has {line_count} lines"


@pytest.mark.parametrize(
    "path", python_files(*CODE, "demo", "bench"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    assert not text or ast.get_docstring(ast.parse(text)), "no docstring at the top"


def test_nothing_new_lies_at_the_top() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name.partition("/")[0] for name in listed} - TOP_LEVEL == set()


LIBRARY_NAMES = (
    "fused_topk_deepseek|use_deepseek_fp8_block_scale|gemma_rmsnorm|gemma_fused_add_rmsnorm"
)


def families_named(text: str) -> list[str]:
    """Families that a text names, in any spelling: a word in a sentence, a class, a model type.

    "llama3" is not one: it is how every config.json spells a way of scaling positions. Neither are
    names that a kernel library gives to its functions and options.
    """
    text = re.sub(f"llama3|{LIBRARY_NAMES}", "", text.lower())
    return [family for family in FAMILIES if family in text] + re.findall(r"\bling\b", text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("As Qwen3-MoE has them", ["qwen"]),
        ("class LlamaForCausalLM:", ["llama"]),
        ("rope_type: llama3, scaling", []),
        ("norm.gemma_rmsnorm, norm.gemma_fused_add_rmsnorm, fused_topk_deepseek", []),
        ("gpt_oss and Ling 2", ["gpt_oss", "ling"]),
    ],
)
def test_a_family_is_seen_in_every_spelling(text: str, named: list[str]) -> None:
    assert families_named(text) == named


def test_no_family_is_named_outside_its_files() -> None:
    doors = (
        "common/layout/families.py", "common/engine/models/", "common/engine/attention/",
        "common/output_formats.py", "common/frontend/text/parsing/formats.py",
    )  # fmt: skip
    for path in python_files(*CODE):
        name = str(path.relative_to(ROOT))
        if not name.startswith(doors):
            named = families_named(path.read_text())
            assert not named, f"{name} names {named}"
