"""The forms of public chat templates (tests/data/templates), each with a tokenizer of bytes."""

import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.agents.tools import Tool

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
SPECIAL = re.compile(r"<\|[A-Za-z_0-9]+\|>|\[/?[A-Z_]+\]|<(?:start|end)_of_(?:turn|utterance)>")


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


SCHEMAS = [Tool.of(add).schema]


def tokenizer_of(name):
    template = (TEMPLATES / f"{name}.jinja").read_text()
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*SPECIAL.findall(template), "<|end|>"} - {"<s>", "</s>"})})
    tokenizer.chat_template = template
    return tokenizer
