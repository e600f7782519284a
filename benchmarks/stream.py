"""Streams: what a second turn costs, and how fast clients in a closed loop are served.

    python -m benchmarks.stream --model smollm2-135m --device cpu --clients 8 --requests 32 --conversation 1000
    python -m benchmarks.stream --shape 1.5b --clients 64 256 1024 --requests 4096

A second turn: a conversation of so many tokens is kept, then 32 new tokens and a response follow; against the same tokens as a whole new
prompt, in turn, the median of --repeats. Clients in a closed loop: each has one request in flight and sends the next when it has its
answer; prompts and response lengths are those of the load gsm8k_like. The rate is that of all tokens from the first request to the last
answer, against `generate` of the same requests in the same process. Random weights of a real shape, or a model folder.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.rollout import RESULTS, _about, _model
from benchmarks.workload import LOADS, SHAPES
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.sampling import SamplingParams
from lockstep.models.attention import CACHED
from lockstep.models.load import share_structure
from lockstep.workers.rollout.registry import make_rollout
from lockstep.workers.rollout.request import Completion, Request

NEW, RESPONSE = 32, 32
"""Tokens of a second turn, and of each response in it."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = _model(options, device, dtype)
    config = RolloutConfig(max_num_seqs=max(options.clients), gpu_memory_utilization=options.memory)
    engine: Any = make_rollout(share_structure(model, CACHED), config, 0)
    vocabulary = engine.vocabulary
    result = _about(options, device, dtype) | {"second_turn": _second_turn(engine, options, vocabulary), "closed_loop": []}
    print(json.dumps(result["second_turn"]), flush=True)
    for clients in options.clients:
        result["closed_loop"].append(_closed_loop(engine, options, clients))
        print(json.dumps(result["closed_loop"][-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    name = options.shape if options.model is None else Path(options.model).name
    (options.out / f"stream_{name}_{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--model", help="a Hugging Face folder, a .gguf file or smollm2-135m, instead of random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", type=float, default=0.8, help="share of the free GPU memory for the key-value cache")
    parser.add_argument("--conversation", type=int, default=4000, help="tokens before the second turn")
    parser.add_argument("--clients", type=int, nargs="+", default=[64])
    parser.add_argument("--requests", type=int, default=1024, help="of all clients together; at most 12 of each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    return parser


def _answered(stream: Any, request: Request) -> tuple[Completion, int, float]:
    """The completion of a request that is alone, its index, and the seconds until its first token."""
    start, index, first = time.perf_counter(), stream.add(request), 0.0
    for answer in stream:
        first = first or time.perf_counter() - start
        if isinstance(answer, Completion):
            assert answer.error is None, answer.error
            return answer, index, first
    raise AssertionError("no answer")


def _second_turn(engine: Any, options: argparse.Namespace, vocabulary: int) -> dict[str, float]:
    rng, kept_s, anew_s = random.Random(0), [], []
    sampling = SamplingParams(temperature=1.0, max_tokens=RESPONSE, stop_token_ids=(), seed=0)
    for repeat in range(options.repeats + 1):  # the first compiles and captures
        ids = torch.tensor([rng.randrange(100, vocabulary) for _ in range(options.conversation - RESPONSE)])
        new = torch.tensor([rng.randrange(100, vocabulary) for _ in range(NEW)])
        with engine.open(sampling, num_tokens=4 * options.conversation) as stream:
            first, index, _ = _answered(stream, Request(ids, (repeat, 0, 0), keep=True))
            kept = _answered(stream, Request(new, (repeat, 0, 1), continues=index, streams=True, max_tokens=1))[2]
        with engine.open(sampling, num_tokens=4 * options.conversation) as stream:
            _answered(stream, Request(new, (repeat, 1, 0)))  # what the first request of a stream costs is not counted
            anew = _answered(stream, Request(torch.cat([ids, first.ids, new]), (repeat, 0, 1), streams=True, max_tokens=1))[2]
        if repeat:
            kept_s.append(kept)
            anew_s.append(anew)
    kept, anew = statistics.median(kept_s), statistics.median(anew_s)
    return {"conversation": options.conversation, "kept_s": kept, "anew_s": anew, "ratio": kept / anew}


def _closed_loop(engine: Any, options: argparse.Namespace, clients: int) -> dict[str, float]:
    load = LOADS["gsm8k_like"]()
    pairs = [
        (load.prompts[i % len(load.prompts)], load.lengths[i % len(load.lengths)])
        for i in range(min(options.requests, 12 * clients))
    ]
    requests = [
        Request(torch.tensor(p) % engine.vocabulary, (0, i, 0), max_tokens=n, streams=True) for i, (p, n) in enumerate(pairs)
    ]
    sampling = SamplingParams(temperature=1.0, max_tokens=max(n for _, n in pairs), stop_token_ids=(), seed=0)
    tokens, waits = sum(n for _, n in pairs), []
    engine.seats = clients  # offline generation has as many seats as there are clients
    engine.generate(requests, sampling)  # compiles and captures; more requests would need more pages, and new graphs over them
    start = time.perf_counter()
    engine.generate(requests, sampling)
    offline = tokens / (time.perf_counter() - start)
    with engine.open(sampling) as stream:
        for request in requests[: 3 * clients]:  # compiles and captures
            stream.add(request)
        for _ in stream:
            pass
        start, left = time.perf_counter(), iter(requests)
        asked = {stream.add(request): time.perf_counter() for _, request in zip(range(clients), left, strict=False)}
        for answer in stream:
            if answer.index in asked:
                waits.append(time.perf_counter() - asked.pop(answer.index))
            if isinstance(answer, Completion):
                assert answer.error is None, answer.error
                following = next(left, None)
                if following is not None:
                    asked[stream.add(following)] = time.perf_counter()
        rate = tokens / (time.perf_counter() - start)
    waits.sort()
    return {
        "clients": clients,
        "requests": len(requests),
        "offline_tokens_per_s": offline,
        "stream_tokens_per_s": rate,
        "ratio": rate / offline,
        "first_token_median_s": waits[len(waits) // 2],
        "first_token_p99_s": waits[len(waits) * 99 // 100],
    }


if __name__ == "__main__":
    main()
