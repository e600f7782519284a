"""`python examples/agents/make.py TASK FOLDER [SEED]`: the files of a task (lookup, frozen_lake) for a tiny model that knows nothing.

model/         a tiny Llama with the task's own words as tokens
warmup.parquet conversations for `lockstep sft`: they show what can be said, not what is best
train.parquet, val.parquet   prompts for `lockstep grpo` and `ppo`
"""

from __future__ import annotations

import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def make(task: Any, folder: Path, seed: int) -> None:
    """Write the model and the rows of a task: a module with SPECIAL, WORDS, TEMPLATE, warm_up(chance) and prompts(chance)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(task)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    chance = random.Random(seed)
    splits = {"warmup": task.warm_up(chance), "train": task.prompts(chance, 2048), "val": task.prompts(chance, 256)}
    for name, rows in splits.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def _tokenizer(task: Any) -> PreTrainedTokenizerFast:
    """One token for each word of the task, and for each special one."""
    words = [*task.SPECIAL, *task.WORDS]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*(w for w in task.WORDS if len(w) > 1), "[\\s\\S]"])), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=task.SPECIAL[2:]
    )
    tokenizer.add_tokens(list(task.MARKS))
    tokenizer.chat_template = task.TEMPLATE
    return tokenizer


if __name__ == "__main__":
    name, out, *more = sys.argv[1:]
    make(import_module(name), Path(out), int(*more) if more else 0)
