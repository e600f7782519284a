"""FrozenLake for a tiny model: `python examples/agents/frozen_lake.py FOLDER [SEED]` writes the model, games to warm it up, and prompts.

The games are those of a player who goes the right way in half of his moves and anywhere in the others.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lockstep.agents import Action
from lockstep.agents.gym_text import GymText

MOVES = ("left", "down", "right", "up")
RIGHT_WAY = (1, 2, 1, 0, 1, 1, 1, 1, 2, 1, 1, 1, 2, 2, 2, 2)
"""For each of the 16 fields, a move of a shortest way to the goal."""
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OPTIONS = {"name": "FrozenLake-v1", "is_slippery": False, "max_episode_steps": 12}


def make(folder: Path, seed: int = 0) -> None:
    """Write the model, the games and the prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL, *"SFHG[]\n", *MOVES]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(f"{'|'.join(MOVES)}|[\\s\\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    chance = random.Random(seed)
    pq.write_table(pa.Table.from_pylist([{"messages": _game(chance)} for _ in range(6000)]), folder / "games.parquet")
    rows = [{"prompt": "\n", "data_source": "frozen_lake", "env_kwargs": OPTIONS} for _ in range(256)]
    for split in ("train", "val"):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def _game(chance: random.Random) -> list[dict[str, Any]]:
    game = GymText(**OPTIONS)
    turn = game.reset({}, chance.randrange(1 << 30))
    messages: list[dict[str, Any]] = []
    while not turn.done:
        messages += turn.messages
        field = _field(turn.messages[0]["content"])
        move = MOVES[RIGHT_WAY[field]] if chance.random() < 0.5 else chance.choice(MOVES)
        messages.append({"role": "assistant", "content": move})
        turn = game.step(Action(move, move))
    return messages


def _field(text: str) -> int:
    lines = text.splitlines()
    row = next(i for i, line in enumerate(lines) if "[" in line)
    return 4 * row + lines[row].index("[")


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
