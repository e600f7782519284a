from __future__ import annotations

import pytest
from helpers.word_tokenizer import plain_tokenizer, tokenizer  # noqa: F401
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

QWEN_LIKE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = ["She sold 48 clips in May, and 1,234 more in June: how many did she sell altogether?", "It's what we'll do. "] * 20


def byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few words, with a chat template."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start|>x"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture(scope="session")
def qwen_like() -> PreTrainedTokenizerFast:
    """Cuts words with a regular expression of its own, as the tokenizers of Qwen and Llama 3 do."""
    cut = pre_tokenizers.Split(Regex(QWEN_LIKE), "isolated")
    return byte_level(pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))
