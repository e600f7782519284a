"""A crowd of clients, many of which misbehave, against one server: every answer is checked, every request accounted for, nothing leaks.

    PYTHONPATH=.:tests python tests/tools/serve/load.py --count 10000 --out benchmarks/results/serve_load.json

Some ask and read; some leave before the answer, or in the middle of it; some send half a request, no JSON, wrong fields, bodies that are
too large; some read slowly. Greedy answers are compared with offline generation. At the end the engine must be idle, with all pages free or
kept for prompts alone, and the server's file handles and memory as they were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from helpers.serving import byte_tokenizer, load_served, save_served_model

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.request import Request

LONGEST, NUM_PROMPTS, MAX_BODY = 24, 200, 1 << 16
HANG_S = 120.0


@dataclass(slots=True)
class Question:
    """A prompt, and what greedy decoding answers."""

    prompt: list[int]
    answer: list[int]

    def text(self, tokenizer: Any, max_tokens: int) -> str:
        """The answer of at most so many tokens."""
        return str(tokenizer.decode(self.answer[:max_tokens], skip_special_tokens=True))


def make_questions(folder: str) -> list[Question]:
    """Prompts of 1 to 60 tokens, some of which begin alike, answered offline."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(NUM_PROMPTS)]
    for index in range(0, NUM_PROMPTS, 4):
        prompts[index] = (prompts[0] * 60)[:32] + prompts[index]
    engine = load_served(folder).engine
    sampling = SamplingParams(temperature=0.0, max_tokens=LONGEST, stop_token_ids=(256,), seed=0)
    completions = engine.generate([Request(torch.tensor(prompt), (0, i, 0)) for i, prompt in enumerate(prompts)], sampling)
    return [Question(prompt, completion.ids.tolist()) for prompt, completion in zip(prompts, completions, strict=True)]


@dataclass
class Crowd:
    """The clients. `outcomes` counts what each kind of client met; `wrong` has what must not happen."""

    port: int
    questions: list[Question]
    tokenizer: Any = field(default_factory=byte_tokenizer)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, count: int, at_once: int, seed: int = 0) -> None:
        """`count` clients, `at_once` at a time."""
        seats, rng = asyncio.Semaphore(at_once), random.Random(seed)
        kinds: dict[Callable[[random.Random], Awaitable[str]], int] = {
            self.whole: 24, self.streamed: 20, self.several: 6, self.chat: 5, self.scored: 5, self.slow: 5, self.no_json: 5,
            self.wrong_field: 5, self.too_large: 3, self.wrong_path: 2, self.leaves_early: 10, self.leaves_midway: 7, self.half: 3,
        }  # fmt: skip

        async def one(number: int, kind: Callable[[random.Random], Awaitable[str]]) -> None:
            async with seats:
                try:
                    outcome = await asyncio.wait_for(kind(random.Random(number)), HANG_S)
                except Exception as error:
                    outcome = f"lost: {type(error).__name__}"
                    self.wrong.append(f"client {number} ({kind.__name__}): {error!r}")
                self.outcomes[f"{kind.__name__}: {outcome}"] += 1

        chosen = rng.choices(list(kinds), list(kinds.values()), k=count)
        await asyncio.gather(*(one(number, kind) for number, kind in enumerate(chosen)))

    # -- those who wait for an answer ------------------------------------------------------------------------------------------------

    async def whole(self, rng: random.Random) -> str:
        question, most = rng.choice(self.questions), rng.randint(1, LONGEST)
        answer = await self._ask("/v1/completions", {"prompt": question.prompt, "max_tokens": most, "temperature": 0})
        return self._compare(answer["choices"][0]["text"], question.text(self.tokenizer, most))

    async def several(self, rng: random.Random) -> str:
        chosen = [rng.choice(self.questions) for _ in range(rng.randint(1, 4))]
        body = {"prompt": [question.prompt for question in chosen], "max_tokens": 8, "temperature": 0, "n": 2}
        answer = await self._ask("/v1/completions", body)
        texts = [choice["text"] for choice in answer["choices"]]
        return self._compare(texts, [question.text(self.tokenizer, 8) for question in chosen for _ in range(2)])

    async def chat(self, rng: random.Random) -> str:
        body = {"messages": [{"role": "user", "content": "h\u00e9" * rng.randint(1, 20)}], "max_tokens": 4, "seed": 3}
        first, second = [await self._ask("/v1/chat/completions", body) for _ in range(2)]
        return self._compare(first["choices"], second["choices"])

    async def scored(self, rng: random.Random) -> str:
        question = rng.choice(self.questions)
        body = {"prompt": question.prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        found = (await self._ask("/v1/completions", body))["choices"][0]["logprobs"]
        return self._compare(len(found["token_logprobs"]), len(question.prompt) + 1)

    async def streamed(self, rng: random.Random) -> str:
        return await self._read_stream(rng, slowly=False)

    async def slow(self, rng: random.Random) -> str:
        return await self._read_stream(rng, slowly=True)

    async def _read_stream(self, rng: random.Random, slowly: bool) -> str:
        question, most = rng.choice(self.questions), rng.randint(1, LONGEST)
        body = {"prompt": question.prompt, "max_tokens": most, "temperature": 0, "stream": True}
        _, raw = await self._patiently("/v1/completions", body, slowly)
        events = raw.decode().split("\n\n")
        if events[-2:] != ["data: [DONE]", ""]:
            return self._compare(events[-1:], "a stream that ends with [DONE]")
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
        return self._compare("".join(texts), question.text(self.tokenizer, most))

    # -- those who ask for nonsense --------------------------------------------------------------------------------------------------

    async def no_json(self, rng: random.Random) -> str:
        body = rng.choice([b"{", b"", b"\xff\xff", b"[1]", b'{"prompt": "\\ud800"}', b'{"prompt": "a",}', b"{" * 2000])
        return self._status(await self._send("/v1/completions", body), 400)

    async def wrong_field(self, rng: random.Random) -> str:
        wrong = {"temperature": "hot", "n": 0, "prompt": [300], "max_tokens": -1, "wrong": 1, "stop": [""], "model": "other"}
        name = rng.choice(list(wrong))
        body = {"prompt": "a"} | {name: wrong[name]}  # a prompt is read only when there is room in the queue
        return self._status(await self._patiently("/v1/completions", body, False), 404 if name == "model" else 400)

    async def too_large(self, rng: random.Random) -> str:
        body = b'{"prompt": "' + b"a" * rng.randint(MAX_BODY, 20 * MAX_BODY) + b'"}'
        return self._status(await self._send("/v1/completions", body), 413)

    async def wrong_path(self, rng: random.Random) -> str:
        return self._status(await self._send(f"/v1/{rng.randint(0, 10**9)}", b"{}"), 404)

    # -- those who leave -------------------------------------------------------------------------------------------------------------

    async def leaves_early(self, rng: random.Random) -> str:
        body = {
            "prompt": rng.choice(self.questions).prompt,
            "max_tokens": 190,
            "n": rng.randint(1, 3),
            "stream": rng.random() < 0.5,
        }
        _, writer = await self._begin("/v1/completions", json.dumps(body | {"ignore_eos": True}).encode())
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.01, 0.05]))
        writer.close()
        return "left"

    async def leaves_midway(self, rng: random.Random) -> str:
        body = {"prompt": rng.choice(self.questions).prompt, "max_tokens": 190, "ignore_eos": True, "stream": True}
        reader, writer = await self._begin("/v1/completions", json.dumps(body).encode())
        await reader.read(rng.choice([1, 100, 1000]))
        writer.transport.abort() if rng.random() < 0.5 else writer.close()
        return "left"

    async def half(self, rng: random.Random) -> str:
        whole = self._head("/v1/completions", 500) + b'{"prompt": '
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(whole[: rng.randint(0, len(whole))])
        await writer.drain()
        writer.close()
        return "left"

    # -- the wire --------------------------------------------------------------------------------------------------------------------

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, raw = await self._patiently(path, body, False)
        answer: dict[str, Any] = json.loads(raw)
        if status != 200:
            raise AssertionError(f"status {status}: {answer}")
        return answer

    async def _patiently(self, path: str, body: dict[str, Any], slowly: bool) -> tuple[int, bytes]:
        """Asks again while the queue is full."""
        while True:
            status, raw = await self._send(path, json.dumps(body).encode(), slowly)
            if status != 429:
                return status, raw
            self.outcomes["asked again after 429"] += 1
            await asyncio.sleep(0.05)

    async def _send(self, path: str, body: bytes, slowly: bool = False) -> tuple[int, bytes]:
        reader, writer = await self._begin(path, body)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if slowly:
                data = b""
                while piece := await reader.read(40):
                    data += piece
                    await asyncio.sleep(0.01)
            else:
                data = await reader.read()
        finally:
            writer.close()
        if b"chunked" in head.lower():
            data = _unchunked(data)
        return int(head.split()[1]), data

    async def _begin(self, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self._head(path, len(body)) + body)
        return reader, writer

    def _head(self, path: str, length: int) -> bytes:
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    def _status(self, answer: tuple[int, bytes], expected: int) -> str:
        return self._compare((answer[0], set(json.loads(answer[1])["error"])), (expected, {"message", "type", "param", "code"}))

    def _compare(self, found: Any, expected: Any) -> str:
        if found == expected:
            return "right"
        self.wrong.append(f"expected {expected!r}, found {found!r}")
        return "wrong"


def _unchunked(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


async def idle(port: int) -> dict[str, float]:
    """/metrics, when the engine has nothing left to do. Raises TimeoutError when that does not come."""
    async with asyncio.timeout(HANG_S):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            lines = (await reader.read()).decode().splitlines()
            writer.close()
            found = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("lockstep_")}
            if found["lockstep_requests_open"] == 0:
                return found
            await asyncio.sleep(0.02)


async def load(port: int, folder: str, count: int, at_once: int, seed: int = 0) -> tuple[Crowd, dict[str, float]]:
    """Let `count` clients loose on a server of the model in `folder`; returns them, and /metrics afterwards."""
    crowd = Crowd(port, await asyncio.to_thread(make_questions, folder))
    await crowd.run(count, at_once, seed)
    return crowd, await idle(port)


def state_of(server: psutil.Process) -> dict[str, float]:
    """What could leak."""
    return {"handles": server.num_fds(), "threads": server.num_threads(), "rss_mib": round(server.memory_info().rss / 2**20, 1)}


def main() -> int:
    """The whole load against a server in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_served_model(Path(folder))
        limits = ["--max-num-seqs", "16", "--max-queue", "32", "--max-body-bytes", str(MAX_BODY), "--num-tokens", "4096"]
        command = [
            sys.executable,
            "-m",
            "lockstep.cli",
            "serve",
            folder,
            "--name",
            "tiny",
            "--port",
            "0",
            "--device",
            "cpu",
            *limits,
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            assert process.stdout is not None
            port = int(next(line for line in process.stdout if line.startswith("serving ")).rsplit(":", 1)[1])
            result = asyncio.run(_measured(port, folder, options.count, options.at_once, psutil.Process(process.pid)))
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(HANG_S)
    result["exit_status"] = status
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["wrong"] or result["leaks"] or status != 128 + signal.SIGTERM else 0


async def _measured(port: int, folder: str, count: int, at_once: int, server: psutil.Process) -> dict[str, Any]:
    warm_up = max(100, count // 10)
    first, before = await load(port, folder, warm_up, at_once, seed=1)
    state, started = state_of(server), time.monotonic()
    crowd, after = await load(port, folder, count, at_once)
    seconds, last = time.monotonic() - started, state_of(server)
    leaks = [name for name in ("handles", "threads") if last[name] > state[name]]
    leaks += ["rss_mib"] if last["rss_mib"] > 1.1 * state["rss_mib"] else []
    leaks += ["cache_pages_free"] if pages_lost(after) else []
    return {
        "clients": count, "at_once": at_once, "warm_up": warm_up, "seconds": round(seconds, 1),
        "outcomes": dict(sorted(crowd.outcomes.items())), "wrong": [*first.wrong, *crowd.wrong][:20], "leaks": leaks,
        "server_after_warm_up": state, "server_at_the_end": last,
        "cache": {name: [before[name], after[name]] for name in after if "cache_pages" in name},
    }  # fmt: skip


def pages_lost(metrics: dict[str, float]) -> bool:
    """Whether pages of an idle engine are neither free nor kept for prompts that may come again."""
    free, kept = metrics["lockstep_cache_pages_free"], metrics["lockstep_cache_pages_kept"]
    return free + kept != metrics["lockstep_cache_pages"]


if __name__ == "__main__":
    sys.exit(main())
