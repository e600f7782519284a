"""A tokenizer small enough to read: one word, one id."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<unk>", "<eos>", "<user>", "<assistant>", "<system>", *(f"w{i}" for i in range(50))]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ['user', 'system'] %}{{ raise_exception('role ' + m['role']) }}{% endif %}"
    "<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if suffix is defined %} {{ suffix }}{% endif %}"
)


@pytest.fixture
def plain_tokenizer() -> PreTrainedTokenizerFast:
    """Has no chat template and no pad token."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")


@pytest.fixture
def tokenizer(plain_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Has a chat template: <role> content ... <assistant>."""
    plain_tokenizer.chat_template = TEMPLATE
    return plain_tokenizer
