"""Builds the demo tokenizer: byte-level BPE in which each word of a prompt is one token.

Byte-level, so any text encodes and decodes to itself. Written with the `tokenizers` library and
plain JSON; knows no model.
"""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.words import ADJECTIVES, FRAME, NAMES, OBJECTS

BOS: Final = "<|bos|>"
EOS: Final = "<|eos|>"
PAD: Final = "<|pad|>"

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{{- ' Answer: ' + message.content.strip() + eos_token + '\\n' -}}"
    "{%- else -%}"
    "{{- message.content.rstrip().removesuffix('Answer:').rstrip() -}}"
    "{%- if message.role == 'system' -%}{{- '\\n' -}}{%- endif -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- ' Answer:' -}}{%- endif -%}"
)
"""User content as it stands, then " Answer:": what the model reads outside of chat too."""


def build_tokenizer() -> Tokenizer:
    """The tokenizer, the same on every call: 256 bytes, 3 special tokens, and merged words."""
    words = sorted({*NAMES, *ADJECTIVES, *OBJECTS, *FRAME})
    # A word is trained with the space before it, as in a sentence. A word that starts a line or a
    # chat message is trained without it too.
    starts = ["Facts", "Question", *sorted(NAMES)]
    corpus = [f" {word}" for word in words] + starts
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1 << 16,  # never reached: training ends when each word is one token
        min_frequency=1,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    for word in corpus:
        token_id(tokenizer, word)
    return tokenizer


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of `text`, which must be one token: a word, or a special token as it is written."""
    ids = tokenizer.encode(text).ids
    assert len(ids) == 1, f"{text!r} is {len(ids)} tokens"
    return int(ids[0])


def write_tokenizer(folder: Path, context_length: int) -> Tokenizer:
    """Write tokenizer.json and tokenizer_config.json to `folder`.

    Args:
        context_length: the longest sequence, in tokens.
    """
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "bos_token": BOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": context_length,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "tokenizer_config.json").write_text(text)
    return tokenizer
