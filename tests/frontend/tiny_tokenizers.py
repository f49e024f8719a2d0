"""Tiny tokenizers of the kinds that checkpoints come with, written as checkpoint directories."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from tokenizers import pre_tokenizers as pre

TEXTS = [
    "The quick brown fox jumps over the lazy dog. The code of Ada is 42.",
    "Prefill and decode: hello, hello world! Naïve café, 你好世界, emoji 🙂🙂, Ångström.",
    "user assistant system tools stop STOP the end of the story\n\n",
]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think></think>' }}{% endif %}"
    "{%- endif %}"
)


def byte_level_backend() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        initial_alphabet=pre.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>")])
    return backend


def byte_fallback_backend() -> Tokenizer:
    """As Llama 2 and Mistral have it: words start with a mark, unknown characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,!?TAé"]
    merges = []
    for left, right in [("t", "h"), ("h", "e"), ("▁", "t"), ("l", "o"), ("▁", "a")]:
        merges.append((left, right))
        pieces.append(left + right)
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace_backend() -> Tokenizer:
    """As T5 and Gemma-like Unigram vocabularies have it."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁the", "▁fox", "es", "e", "s", ".", "é", "好"]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = pre.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def word_piece_backend() -> Tokenizer:
    """As BERT has it: continuations are marked, spaces are not."""
    pieces = ["[UNK]", "the", "fox", "##es", "##s", "a", "b", ".", "café", "##é"]
    backend = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre.Split(Regex(r"\s+"), "removed")
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return backend


BACKENDS = {
    "byte level": byte_level_backend,
    "byte fallback": byte_fallback_backend,
    "metaspace": metaspace_backend,
    "word piece": word_piece_backend,
}


def write_tokenizer(directory: Path, backend: Tokenizer | None = None, **config: object) -> Path:
    """A checkpoint directory with only a tokenizer in it; keywords go to tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (backend or byte_level_backend()).save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
