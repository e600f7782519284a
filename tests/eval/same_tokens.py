"""The same prompts through `engine.generate`, an open stream, and `lockstep serve` asked by the openai package: the same tokens.

    PYTHONPATH=.:tests .venv-eval/bin/python tests/eval/same_tokens.py --count 500 --out benchmarks/results/same_tokens.json

Prompts are questions of GSM8K, in float32. Every second one takes the likeliest tokens, the others are drawn with a seed of their
own. The server is asked by `AsyncOpenAI`, 32 requests at a time, one half of them streamed. Compared are tokens, log-probs, texts and
finish reasons.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from eval.parity import DATA, served

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.sampling import SamplingParams
from lockstep.tools.load_model import LoadedModel, find_model, load
from lockstep.tools.serve.text import ResponseText, Vocabulary
from lockstep.workers.rollout.request import Completion, Request

BOUND = 1e-4
"""How far two log-probs of a token may differ: they are computed in other batches."""
AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Answer:
    """What came to one prompt. Tokens by name, since that is how OpenAI's answers have them."""

    tokens: list[str]
    log_probs: list[float]
    text: str
    reason: str


def drawing(number: int) -> dict[str, Any]:
    """How prompt `number` is answered, in the words of the openai package."""
    return {"temperature": 0.0} if number % 2 == 0 else {"temperature": 1.0, "seed": number}


def requests_of(prompts: list[list[int]], max_tokens: int, stop_token_ids: tuple[int, ...]) -> list[Request]:
    """The same for the engine: a call of the server with one prompt has the key (0, 0, 0)."""
    found = []
    for number, ids in enumerate(prompts):
        own = {"seed": 0} | drawing(number)
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids, **own)
        found.append(Request(torch.tensor(ids), (0, 0, 0), sampling=params))
    return found


def from_engine(loaded: LoadedModel, requests: list[Request], is_open: bool) -> list[Answer]:
    """By `generate`, or by a stream that is open."""
    assert requests[0].sampling is not None
    if is_open:
        with loaded.engine.open(requests[0].sampling, num_tokens=16384) as stream:
            for request in requests:
                stream.add(request)
            completions = sorted((one for one in stream if isinstance(one, Completion)), key=lambda one: one.index)
    else:
        completions = loaded.engine.generate(requests, requests[0].sampling)
    vocabulary = Vocabulary(loaded.tokenizer)
    return [
        Answer(
            [vocabulary.name(token) for token in one.ids.tolist()],
            one.log_probs.tolist(),
            ResponseText(vocabulary, (), True).whole(one.ids.tolist(), one.finish_reason),
            one.finish_reason,
        )
        for one in completions
    ]


async def from_server(address: str, model: str, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """By the openai package."""
    import openai

    seats = asyncio.Semaphore(AT_ONCE)
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=3600, max_retries=0) as client:

        async def ask(number: int) -> Answer:
            body = {"model": model, "prompt": prompts[number], "max_tokens": max_tokens, "logprobs": 0} | drawing(number)
            async with seats:
                if number % 4 < 2:
                    choice = (await client.completions.create(**body)).choices[0]
                    return Answer(choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.text, choice.finish_reason)
                pieces = [piece.choices[0] async for piece in await client.completions.create(**body, stream=True)]
                scored = [piece.logprobs for piece in pieces if piece.logprobs is not None]
                return Answer(
                    [token for part in scored for token in part.tokens],
                    [value for part in scored for value in part.token_logprobs],
                    "".join(piece.text for piece in pieces),
                    pieces[-1].finish_reason,
                )

        return list(await asyncio.gather(*(ask(number) for number in range(len(prompts)))))


def compare(found: list[Answer], expected: list[Answer]) -> dict[str, Any]:
    """Which prompts have other tokens, texts or ends, and how far log-probs of the same tokens are apart."""
    pairs = list(zip(found, expected, strict=True))
    different = [i for i, (a, b) in enumerate(pairs) if (a.tokens, a.text, a.reason) != (b.tokens, b.text, b.reason)]
    apart = [abs(x - y) for a, b in pairs if a.tokens == b.tokens for x, y in zip(a.log_probs, b.log_probs, strict=True)]
    return {"different": different, "largest_difference": max(apart)}


def run(model: str, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """All three ways, and the comparison."""
    loaded = load(find_model(model), RolloutConfig(max_num_seqs=64), dtype="float32", device="cpu")
    requests, seconds = requests_of(prompts, max_tokens, loaded.stop_token_ids), {}
    answers = {}
    for name in ("generate", "stream", "server"):
        started = time.monotonic()
        if name == "server":
            with served(model, "--dtype", "float32", "--num-tokens", "16384", "--name", "model") as address:
                answers[name] = asyncio.run(from_server(address, "model", prompts, max_tokens))
        else:
            answers[name] = from_engine(loaded, requests, is_open=name == "stream")
        seconds[name] = round(time.monotonic() - started, 1)
    return {
        "prompts": len(prompts), "tokens": sum(len(answer.tokens) for answer in answers["generate"]), "bound": BOUND, "seconds": seconds,
        "against_generate": {name: compare(answers[name], answers["generate"]) for name in ("stream", "server")},
    }  # fmt: skip


def is_same(result: dict[str, Any]) -> bool:
    """Whether all tokens are the same, and log-probs to BOUND."""
    return all(not way["different"] and way["largest_difference"] <= BOUND for way in result["against_generate"].values())


def main() -> int:
    """Compare, print, and say by the exit status whether they are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = (DATA / "gsm8k" / "test.jsonl").read_text().splitlines()[: options.count]
    tokenizer = load(find_model(options.model), RolloutConfig(), dtype="float32", device="cpu").tokenizer
    result = run(options.model, [tokenizer.encode(json.loads(row)["question"]) for row in rows], options.max_tokens)
    result = {"model": options.model, "max_tokens": options.max_tokens, "same": is_same(result)} | result
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["same"] else 1


if __name__ == "__main__":
    sys.exit(main())
