"""Random generations on a device, each compared with the plain engine: the native engine on the CPU, in PyTorch alone.

    python -m tests.gpu.soak --count 2000 --minutes 25

Prints a table and the cases that differ; ends with status 1 if there is one, or if the time was up before the first case. Models are tiny
and float32, so tokens are equal but where a random number falls within rounding of the border between two tokens; such a response is
compared up to there and counted as `border`.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from helpers.families import FAMILIES
from helpers.rollouts import PAD
from helpers.tiny import tiny_model

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.sampling import SamplingParams
from lockstep.models.cached_attention import CACHED
from lockstep.models.load import share_structure
from lockstep.workers.rollout.base import Completion, Request
from lockstep.workers.rollout.counted import request_keys, uniforms
from lockstep.workers.rollout.native.cpu.backend import TorchBackend
from lockstep.workers.rollout.native.cpu.passes import PAGE_SIZE
from lockstep.workers.rollout.native.engine import NativeRollout
from lockstep.workers.rollout.native.probe import cache_shape
from lockstep.workers.rollout.sampling import sample

VOCABULARY, BAD = 32, 31
"""Token BAD has no finite embedding: a request that has it, or draws it, ends with an error."""
_LOG_PROB = 2e-4
_BORDER = 1e-4
"""How far off the log-prob of an equal token, and the random number behind another token, may be."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One generation."""

    family: str
    settings: tuple[int, int, bool]
    """max_num_seqs, max_num_batched_tokens, batch_invariant"""
    requests: list[Request]
    params: SamplingParams


def letters(ids: list[int]) -> str:
    """Text of tokens, one letter each."""
    return "".join(chr(65 + token) for token in ids)


def draw_case(seed: int) -> Case:
    """The case of this number."""
    rng = random.Random(seed)
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.0]),
        top_k=rng.choice([-1, -1, 5]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        max_tokens=rng.choice([1, 10, 40]),
        stop_token_ids=rng.choice([(), (1,), (1, 7, -1), (500,)]),
        stop=rng.choice([(), (), ("AB", "D")]),
        seed=seed,
    )
    requests: list[Request] = []
    for prompt in range(rng.randint(1, 12)):
        ids = torch.tensor([rng.randrange(VOCABULARY - 1) for _ in range(rng.choice([1, 5, 64, 65, 150]))])
        if rng.random() < 0.05:
            ids[-1] = BAD
        for k in range(rng.choice([1, 2, 8])):
            limit, stop = rng.choice([None, None, rng.randint(1, 60)]), rng.choice([None, None, (rng.randrange(VOCABULARY),)])
            requests.append(Request(ids, (seed, prompt, k), max_tokens=limit, stop_token_ids=stop))
    settings = (rng.choice([2, 16, 64]), rng.choice([33, 256, 8192]), rng.random() < 0.2)
    return Case(rng.choice(["llama", "qwen2", "qwen3", "mistral", "gemma2"]), settings, requests, params)


class Plain(NativeRollout):
    """The plain engine: one pass after the other through the Hugging Face module."""

    @property
    def backend(self) -> Any:  # type: ignore[override]
        if "_plain" not in vars(self):
            self._plain = TorchBackend(self.module, cache_shape(self.module, PAGE_SIZE), 0.5)
        return self._plain


@lru_cache(maxsize=64)
def make_engine(kind: type[NativeRollout], family: str, settings: tuple[int, int, bool], device: str) -> NativeRollout:
    """An engine over its own module of the family."""
    model = tiny_model(family, **FAMILIES[family] | {"max_position_embeddings": 256, "tie_word_embeddings": False})
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = torch.nan
    seats, budget, invariant = settings
    config = RolloutConfig(
        max_num_seqs=seats, max_num_batched_tokens=budget, batch_invariant=invariant, gpu_memory_utilization=0.05
    )
    return kind(share_structure(model.to(device), CACHED), config, PAD, letters)


def compare(case: Case, found: list[Completion], plain: list[Completion], engine: NativeRollout) -> Counter[str]:
    """How many responses are equal, differ after a border, or are wrong."""
    verdicts: Counter[str] = Counter()
    for request, mine, theirs in zip(case.requests, found, plain, strict=True):
        a, b = mine.ids.tolist(), theirs.ids.tolist()
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        near = torch.allclose(mine.log_probs[:place], theirs.log_probs[:place], atol=_LOG_PROB, rtol=0)
        if near and a == b and (mine.finish_reason, mine.error) == (theirs.finish_reason, theirs.error):
            verdicts["equal"] += 1
        elif near and place < min(len(a), len(b)) and a[place] in _neighbours(case, request, b[:place], engine):
            verdicts["border"] += 1
        else:
            verdicts["wrong"] += 1
    return verdicts


@torch.no_grad()
def _neighbours(case: Case, request: Request, response: list[int], engine: NativeRollout) -> set[int]:
    """The tokens that a random number, and a top-p, within _BORDER of the real ones would draw after `response`."""
    history = torch.cat([request.prompt_ids, torch.tensor(response, dtype=torch.int64)])
    params, attention = case.params, engine.module.config._attn_implementation
    engine.module.set_attn_implementation("eager")
    logits = engine.module(input_ids=history[None], use_cache=False).logits[0, -1:].float()
    engine.module.set_attn_implementation(attention)
    number = uniforms(request_keys(params.seed, [request.key]), torch.tensor([len(response)]))
    found = set()
    for shift in (-_BORDER, 0.0, _BORDER):
        for top_p in {params.top_p, min(1.0, params.top_p + _BORDER), params.top_p - _BORDER if params.top_p < 1.0 else 1.0}:
            uniform = (number + shift).clamp(0.0, 1.0 - 2**-24)
            noisy = logits + _BORDER * torch.randn_like(logits) if params.temperature == 0 else logits
            token, _ = sample(
                noisy, uniform, params.temperature, params.top_k, top_p, params.min_p, params.repetition_penalty, [history]
            )
            found.add(int(token))
    return found


def soak(count: int, seconds: float, device: str, first: int = 0) -> tuple[Counter[str], list[int]]:
    """Compare `count` cases, or as many as fit into the time: responses by verdict (and "cases"), and the seeds of the wrong cases."""
    end, total, wrong = time.monotonic() + seconds, Counter[str](), []
    for seed in range(first, first + count):
        if time.monotonic() > end:
            break
        case = draw_case(seed)
        engine, plain = (
            make_engine(NativeRollout, case.family, case.settings, device),
            make_engine(Plain, case.family, (16, 512, False), "cpu"),
        )
        verdicts = compare(case, engine.generate(case.requests, case.params), plain.generate(case.requests, case.params), plain)
        total += verdicts + Counter(cases=1)
        if verdicts["wrong"]:
            wrong.append(seed)
    return total, wrong


def main() -> int:
    """Parse, soak, print; the status."""
    parser = argparse.ArgumentParser(description="random generations on a device against the plain engine")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=25.0, help="stop after this time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    start = time.monotonic()
    total, wrong = soak(options.count, 60 * options.minutes, options.device, options.first)
    print("| cases | equal | border | wrong | seconds |\n|---|---|---|---|---|")
    numbers = [str(total[name]) for name in ("cases", "equal", "border", "wrong")]
    print(f"| {' | '.join(numbers)} | {time.monotonic() - start:.0f} |")
    for seed in wrong[:20]:
        case = draw_case(seed)
        print(f"wrong: --first {seed} --count 1   {case.family} {case.settings} {case.params}")
    return 1 if wrong or not total["cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
