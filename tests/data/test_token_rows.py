"""What a reward model reads in RL is what it is trained on, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lockstep.data.pairs import PairDataset
from lockstep.data.token_rows import ScoredText

TURNS = [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "In May?"}, {"role": "user", "content": "Yes."}]


def pair_ids(folder: Path, tokenizer: Any, prompt: Any) -> list[list[int]]:
    path = folder / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "chosen": "48", "rejected": "1,234 more "}))
    batch = PairDataset(path, tokenizer, max_length=500, whole=True).batch([0])
    rows = zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True)
    return [[*prompt.tolist(), *response.tolist()] for prompt, response in rows]


@pytest.mark.parametrize("prompt", ["how many?", TURNS], ids=["text", "messages"])
def test_with_a_template_both_are_the_template_as_it_is(tmp_path: Path, qwen_like: PreTrainedTokenizerFast, prompt: Any) -> None:
    """Up to the line break after the end of turn: what plain transformers and others' reward models read."""
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    found = pair_ids(tmp_path, qwen_like, prompt)
    for ids, answer in zip(found, ("48", "1,234 more "), strict=True):
        chat = [*before, {"role": "assistant", "content": answer}]
        assert ids == ScoredText(qwen_like).ids(prompt, answer) == qwen_like.apply_chat_template(chat, return_dict=False)
        assert qwen_like.decode(ids).endswith("<|im_end|>\n")


def test_without_a_template_both_end_with_the_end_token(tmp_path: Path, qwen_like: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=qwen_like.backend_tokenizer, eos_token="<|endoftext|>")
    for ids, answer in zip(pair_ids(tmp_path, plain, "how many?"), ("48", "1,234 more "), strict=True):
        assert ids == ScoredText(plain).ids("how many?", answer)
        assert plain.decode(ids) == f"how many?{answer}<|endoftext|>"


def test_the_end_token_is_added_where_the_template_writes_none(qwen_like: PreTrainedTokenizerFast) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=qwen_like.backend_tokenizer, eos_token="<|endoftext|>")
    bare.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    assert bare.decode(ScoredText(bare).ids("why?", "so")) == "user: why?\nassistant: so\n<|endoftext|>"
