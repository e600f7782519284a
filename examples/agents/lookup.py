"""A task that needs a tool: the user names a key, the word that belongs to it is known to a tool alone.

`python examples/agents/lookup.py FOLDER [SEED]` writes a tiny model that knows nothing, conversations to warm it up (`lockstep sft`), and
prompts (`lockstep grpo`). The conversations are careless: two in three guess the word instead of asking for it. So the model has both
habits, the wrong one more often, and the reward has to sort them out.
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

from lockstep.agents import Action, ToolEnvironment, Turn

LETTERS = "abcdefghij"
CALL, END = '<tool_call>{"name": "look_up", "arguments": {"key": "', '"}}</tool_call>'
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>", "<tool>", "<tools>"]
TEMPLATE = (
    "{% if tools %}<tools>{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% for c in m.tool_calls or [] %}" + CALL + "{{ c.function.arguments.values() | first }}" + END + "{% endfor %}"
    "{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Lookup(ToolEnvironment):
    """The word of an episode comes from its seed, so it cannot be learned: it must be looked up."""

    is_judged = False
    is_quick = True
    tools = ("look_up",)

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        """The user names a key."""
        self.key, self.word = row["prompt"], "".join(random.Random(seed).choices(LETTERS, k=4))
        return Turn([{"role": "user", "content": self.key}])

    def look_up(self, key: str) -> str:
        """The word that belongs to a key.

        Args:
            key: The key.
        """
        return self.word if key == self.key else LETTERS[:4]

    def step(self, action: Action) -> Turn:
        """A call is answered; an answer is right or wrong."""
        if action.calls or action.faults:
            turn = super().step(action)
            assert isinstance(turn, Turn)
            return turn
        right = action.content == self.word
        return Turn(reward=float(right), done=True, info={"right": int(right)})


def make(folder: Path, seed: int = 0) -> None:
    """Write the model, the conversations and the prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL, *LETTERS]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.add_tokens([CALL, END])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    chance = random.Random(seed)
    schema = [{"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}}]
    rows = [{"messages": _conversation(chance), "tools": schema} for _ in range(16000)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "conversations.parquet")
    for split, count in (("train", 2048), ("val", 256)):
        prompts = [{"prompt": _word(chance, 3), "data_source": "lookup"} for _ in range(count)]
        pq.write_table(pa.Table.from_pylist(prompts), folder / f"{split}.parquet")


def _word(chance: random.Random, length: int) -> str:
    return "".join(chance.choices(LETTERS, k=length))


def _conversation(chance: random.Random) -> list[dict[str, Any]]:
    key, word = _word(chance, 3), _word(chance, 4)
    messages: list[dict[str, Any]] = [{"role": "user", "content": key}]
    if chance.random() < 1 / 3:
        call = {"id": "0", "type": "function", "function": {"name": "look_up", "arguments": f'{{"key": "{key}"}}'}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": word}]
    return [*messages, {"role": "assistant", "content": word}]


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
