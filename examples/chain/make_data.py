"""Files of the chain on the embedded task: a model that knows nothing, careless examples, preference pairs, prompts with a reward.

python examples/chain/make_data.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from lockstep.embedded.task import make_tokenizer, make_words, model_config, write_prompts

NUM_VAL = 256


def main(folder: Path) -> None:
    """Write model/, sft.jsonl, pairs.jsonl, val_pairs.jsonl, train.parquet and val.parquet."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, tokenizer = random.Random(0), make_tokenizer()
    words = make_words(0)
    train, val = words[:-NUM_VAL], words[-NUM_VAL:]
    torch.manual_seed(0)
    LlamaForCausalLM(model_config(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    # Three examples in five copy the word instead of writing it backwards: so the model has both ways, the wrong one more often.
    write(folder / "sft.jsonl", [{"prompt": ask(w), "completion": answer(w if rng.random() < 0.6 else w[::-1])} for w in train * 8])
    pairs = [{"prompt": ask(w), "chosen": answer(w[::-1]), "rejected": answer(wrong(w, rng))} for w in words if w != w[::-1]]
    write(folder / "pairs.jsonl", pairs[:-NUM_VAL])
    write(folder / "val_pairs.jsonl", pairs[-NUM_VAL:])
    write_prompts(folder, "train", train)
    write_prompts(folder, "val", val)


def ask(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": word}]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def wrong(word: str, rng: random.Random) -> str:
    """The word as it is or, one time in three, backwards with one letter another."""
    letters = list(word[::-1])
    place = rng.randrange(len(letters))
    letters[place] = "abcdefghij"[("abcdefghij".index(letters[place]) + rng.randint(1, 9)) % 10]
    return "".join(letters) if rng.random() < 1 / 3 else word


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
