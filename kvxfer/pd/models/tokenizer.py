"""A tokenizer of one word an id, split at white space.

Text made of any ids comes back as the same ids, so that a random prompt is exactly as long as asked
for; with tokenizers made of pieces of words it is not. The files are those of the `tokenizers`
library: https://huggingface.co/docs/tokenizers, JSON version 1.0.
"""

import json
from pathlib import Path
from typing import Final

_UNKNOWN = "w0"
# A word before each message says who speaks; words of the vocabulary, since the tokenizer has no
# special ones. Jinja, as Hugging Face's tokenizers render it.
_CHAT_TEMPLATE: Final = (
    "{%- set speakers = {'system': 'w1', 'user': 'w2', 'assistant': 'w3'} -%}"
    "{%- for message in messages -%}"
    "{{ speakers[message['role']] + ' ' + message['content'] + ' ' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ speakers['assistant'] }}{% endif -%}"
)


def write_word_tokenizer(folder: Path, vocab_size: int, max_tokens: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which has a template for chats.

    Args:
        folder: where; it exists.
        vocab_size: ids 0 to vocab_size - 1 are the words w0, w1, ...
        max_tokens: the longest text that the model takes.
    """
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,  # words are joined by one space
        "model": {
            "type": "WordLevel",
            "vocab": {f"w{token}": token for token in range(vocab_size)},
            "unk_token": _UNKNOWN,
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
