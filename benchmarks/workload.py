"""The loads that generation engines are measured on: model shapes, and rollouts as prompts of token ids with a length for each response.

Seeds and distributions are fixed, so numbers of different engines and days compare. Response lengths are forced: each request has its own
limit and nothing stops it before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
        "vocab_size": 49_152, "tie_word_embeddings": True,
    },
    "0.5b": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
        "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "1.5b": {
        "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960,
        "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18_944,
        "vocab_size": 152_064, "tie_word_embeddings": False,
    },
    "thin": {
        "hidden_size": 128, "num_hidden_layers": 30, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128,
        "vocab_size": 512, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
        "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Arguments of transformers.Qwen2Config: the shapes of SmolLM2 and Qwen2.5, SmolLM2's layers with next to nothing in them (what is left is
the host's time), and one for a look at the script itself."""
MIXTURES: dict[str, dict[str, Any]] = {
    "1.5b-moe": {
        "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
        "moe_intermediate_size": 1120, "num_experts": 32, "num_experts_per_tok": 8, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "tiny-moe": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 4, "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Arguments of transformers.Qwen3MoeConfig: of each name a mixture whose tokens go through as many weights as in the dense shape."""


def model_config(shape: str, **options: Any) -> Any:
    """The config of a dense shape or a mixture."""
    from transformers import Qwen2Config, Qwen3MoeConfig

    if shape in SHAPES:
        return Qwen2Config(**SHAPES[shape], **options)
    return Qwen3MoeConfig(**MIXTURES[shape], norm_topk_prob=True, **options)


@dataclass(frozen=True)
class Load:
    """Requests: the n samples of a prompt stand together."""

    prompts: list[list[int]]
    """One for each request; samples of a prompt share the list."""
    lengths: list[int]
    """Tokens of each response."""

    @property
    def num_tokens(self) -> int:
        """Response tokens in all."""
        return sum(self.lengths)


def gsm8k_like(num_prompts: int = 128, n: int = 8, seed: int = 0, vocabulary: int = 256) -> Load:
    """Prompts of 100 to 260 tokens; lognormal responses with median 221 (mean 255), from 16 to 1,024 tokens."""
    return _lognormal(random.Random(seed), num_prompts, n, vocabulary, prompt=(100, 260), mu=5.4, sigma=0.55, response=(16, 1024))


def long_tail(num_prompts: int = 32, n: int = 8, seed: int = 1, vocabulary: int = 256) -> Load:
    """Reasoning: prompts of 150 to 400 tokens; lognormal responses with median 992 (mean 1,261) and a heavy tail, from 64 to 4,096."""
    return _lognormal(random.Random(seed), num_prompts, n, vocabulary, prompt=(150, 400), mu=6.9, sigma=0.8, response=(64, 4096))


def fixed(num_prompts: int = 128, n: int = 8, prompt: int = 256, response: int = 512, seed: int = 2, vocabulary: int = 256) -> Load:
    """All prompts and all responses of one length."""
    rng = random.Random(seed)
    drawn = [[rng.randrange(vocabulary) for _ in range(prompt)] for _ in range(num_prompts)]
    prompts = [ids for ids in drawn for _ in range(n)]
    return Load(prompts, [response] * len(prompts))


def long_rows(num_prompts: int = 32, n: int = 1, seed: int = 3, vocabulary: int = 256) -> Load:
    """Few rows that fill a context of 32,768 tokens: prompts of 384 tokens, responses of 32,384."""
    return fixed(num_prompts, n, prompt=384, response=32_384, seed=seed, vocabulary=vocabulary)


LOADS: dict[str, Callable[..., Load]] = {"fixed": fixed, "gsm8k_like": gsm8k_like, "long_tail": long_tail, "long_rows": long_rows}


def _lognormal(
    rng: random.Random,
    num_prompts: int,
    n: int,
    vocabulary: int,
    prompt: tuple[int, int],
    mu: float,
    sigma: float,
    response: tuple[int, int],
) -> Load:
    prompts, lengths = [], []
    for _ in range(num_prompts):
        count = rng.randint(*prompt)
        ids = [rng.randrange(vocabulary) for _ in range(count)]
        for _ in range(n):
            prompts.append(ids)
            lengths.append(max(response[0], min(response[1], int(rng.lognormvariate(mu, sigma)))))
    return Load(prompts, lengths)
