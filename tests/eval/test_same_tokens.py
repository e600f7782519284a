"""500 prompts of a tiny model through generate, stream and server; tests/eval/same_tokens.py does it with SmolLM2."""

from __future__ import annotations

import random

import pytest
from eval.same_tokens import is_same, run
from helpers.serving import save_served_model

pytest.importorskip("openai")


def test_generate_stream_and_server_give_the_same_tokens(tmp_path):
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(500)]
    for number in range(0, 500, 5):
        prompts[number] = [7] * 48 + prompts[number]  # a start that they share
    result = run(save_served_model(tmp_path), prompts, max_tokens=24)
    assert is_same(result), result["against_generate"]
    assert result["tokens"] > 5000
