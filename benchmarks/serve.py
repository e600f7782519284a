"""What a server costs: tokens a second of concurrent clients against offline generation of the same requests; the time to a first token.

    make bench-serve                                    # the next line, after the environment for vLLM was made
    python -m benchmarks.serve --threads 2 --vllm .venv-vllm/bin/python --out benchmarks/results/serve_cpu_smollm2.json
    python -m benchmarks.serve --shape 1.5b --device cuda --load gsm8k_like --clients 64,256,1024

Clients ask one after the other (a closed loop): as many requests are open as there are clients. Lengths are forced, as in rollout.py.
The systems take turns, `--repeats` times, after a round that is not counted. Prompts are others in every round, of the same lengths: both
servers keep prompts, offline generation does not. So are those of the time to the first token, of one request to a server that does nothing
else. On a machine that does other things too, tokens a CPU second say more than tokens a second: of a server they count its processes, not
the clients. `ratio` is of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.rollout_cpu import mixed
from benchmarks.workload import LOADS, SHAPES, Load
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.sampling import SamplingParams
from lockstep.models.source import model_folder
from lockstep.tools.load_model import find_model, load
from lockstep.workers.rollout.request import Request

Measured = tuple[int, float, float, float]
"""Tokens, seconds, CPU seconds, and of these the seconds of the thread that speaks HTTP."""
BARS = {"offline": {"cpu": 0.9, "cuda": 0.85}, "vllm": {"cpu": 1.0, "cuda": 1.0}}
"""What serving should reach of offline generation and of vLLM's server, in tokens a second."""
NUM_FIRST = 12
"""Requests whose first token is timed."""


class Clients:
    """Asks a server at a port on this machine."""

    def __init__(self, port: int, model: str) -> None:
        self._port, self._model = port, model

    async def run(self, load: Load, count: int) -> int:
        """All requests of the load by `count` clients; returns the tokens that came."""
        left = iter(zip(load.prompts, load.lengths, strict=True))

        async def one() -> int:
            tokens = 0
            for prompt, length in left:
                tokens += json.loads(await self._ask(prompt, length, stream=False))["usage"]["completion_tokens"]
            return tokens

        return sum(await asyncio.gather(*(one() for _ in range(count))))

    async def first_token_s(self, prompt: list[int]) -> float:
        """From asking to the first piece of text."""
        started = time.perf_counter()
        await self._ask(prompt, 8, stream=True)
        return time.perf_counter() - started

    async def _ask(self, prompt: list[int], length: int, stream: bool) -> bytes:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": stream,
        }
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close", "Content-Type: application/json")
        writer.write("\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head.splitlines()[0]:
                raise RuntimeError(f"{head!r} {await reader.read()!r}")
            return await reader.readuntil(b'"text"') if stream else await reader.read()
        finally:
            writer.close()


@contextmanager
def server(command: list[str], port: int, threads: int) -> Iterator[psutil.Process]:
    """Inside, a server runs and answers."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    if "lockstep.cli" not in command:
        del environment["PYTHONPATH"]
        # By itself it keeps one core free, of two. All systems have `threads`, on whichever core the system chooses.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "4"}
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
        try:
            asyncio.run(_answers(process, port, log))
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


async def _answers(process: subprocess.Popen[bytes], port: int, log: Any) -> None:
    while True:
        if process.poll() is not None:
            log.seek(0)
            raise RuntimeError(f"the server ended: {log.read()[-2000:]}")
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            ready = b" 200 " in await reader.readline()
            writer.close()
            if ready:
                return
        except OSError:
            pass
        await asyncio.sleep(0.5)


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process and its children."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def fresh(load_: Load, number: int) -> Load:
    """The same load with other tokens: each token is another one, the same everywhere."""
    known = sorted({token for prompt in load_.prompts for token in prompt})
    others = dict(zip(known, random.Random(number).sample(known, len(known)), strict=True))
    return Load([[others[token] for token in prompt] for prompt in load_.prompts], load_.lengths)


def offline(path: str, options: argparse.Namespace) -> Callable[[Load], Measured]:
    """Generation of all requests of a load in this process, with as many seats as there are clients."""
    loaded = load(find_model(path), RolloutConfig(max_num_seqs=max(options.clients)), dtype=options.dtype, device=options.device)

    def run(load_: Load) -> Measured:
        requests = [
            Request(torch.tensor(p), (0, i, 0), max_tokens=n)
            for i, (p, n) in enumerate(zip(load_.prompts, load_.lengths, strict=True))
        ]
        sampling = SamplingParams(temperature=1.0, max_tokens=max(load_.lengths), stop_token_ids=(), seed=0)
        start, cpu = time.perf_counter(), time.process_time()
        tokens = sum(len(completion.ids) for completion in loaded.engine.generate(requests, sampling))
        measured = tokens, time.perf_counter() - start, time.process_time() - cpu, 0.0
        if options.device == "cuda":
            loaded.engine.sleep()  # the servers have the rest of the same GPU
        return measured

    return run


def served(clients: Clients, process: psutil.Process, load_: Load, count: int) -> Measured:
    """The same requests by clients of a server."""
    start, cpu, http = time.perf_counter(), cpu_s(process), http_s(process)
    tokens = asyncio.run(clients.run(load_, count))
    return tokens, time.perf_counter() - start, cpu_s(process) - cpu, http_s(process) - http


def http_s(process: psutil.Process) -> float:
    """Processor time of a process's first thread, which has the event loop of either server."""
    return next(thread.user_time + thread.system_time for thread in process.threads() if thread.id == process.pid)


def commands(path: str, options: argparse.Namespace) -> dict[str, tuple[list[str], int]]:
    """Name -> the command of a server, and its port."""
    seats = str(max(options.clients))
    own = [
        sys.executable,
        "-m",
        "lockstep.cli",
        "serve",
        path,
        "--name",
        "model",
        "--device",
        options.device,
        "--dtype",
        options.dtype,
    ]
    found = {
        "serve": (
            [*own, "--port", str(options.port), "--max-num-seqs", seats, "--num-tokens", str(options.num_tokens)],
            options.port,
        )
    }
    if options.vllm is not None:
        port = options.port + 1
        theirs = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", path, "--served-model-name", "model"]
        theirs += ["--port", str(port), "--max-num-seqs", seats, "--dtype", options.dtype, "--max-model-len", "2048"]
        found["vllm"] = theirs, port
    return found


def random_model(shape: str, folder: Path) -> str:
    """A model of random weights with a token for each byte; returns its path."""
    transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SHAPES[shape])).bfloat16().save_pretrained(folder)
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder)
    return str(folder)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of --model")
    parser.add_argument("--load", choices=("mixed", *LOADS), default="mixed")
    parser.add_argument("--requests", type=int, default=64, help="of the load mixed")
    parser.add_argument("--clients", default="32", help="how many ask at once; several numbers are measured one after the other")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-tokens", type=int, default=32768, help="tokens that the server's key-value cache holds")
    parser.add_argument("--port", type=int, default=8321, help="and the one after it for vLLM's")
    parser.add_argument("--vllm", metavar="PYTHON", help="measure vLLM's server too, with this environment")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.clients = [int(count) for count in options.clients.split(",")]
    return options


def main() -> None:
    """Measure, print and write."""
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = random_model(options.shape, Path(folder)) if options.shape else model_folder(options.model)
        load_ = (
            LOADS[options.load]()
            if options.load != "mixed"
            else Load(*mixed(options.requests, vocabulary=256 if options.shape else 40_000))
        )
        by_itself = offline(path, options)
        systems = {}
        for name, (command, port) in commands(path, options).items():
            systems[name] = Clients(port, "model"), stack.enter_context(server(command, port, options.threads))
        result = measure(by_itself, systems, load_, options)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, bar in result["bars"].items():
        print(f"{name}: {bar['ratio']} of the tokens a second, bar {bar['bar']}: {'reached' if bar['is_reached'] else 'MISSED'}")
    for name, times in result["time_to_first_token_s"].items():
        print(f"time to first token, idle {name}: median {times['median']} s, largest {times['largest']} s")


def measure(
    by_itself: Callable[[Load], Measured],
    systems: dict[str, tuple[Clients, psutil.Process]],
    load_: Load,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """All systems in turn, after one round that is not counted."""
    rates: dict[str, list[list[float]]] = {}
    for turn in range(options.repeats + 1):
        now = fresh(load_, turn)
        found = {"offline": by_itself(now)}
        for count in options.clients:
            # One load for each number of clients: what a server has seen it would not compute again.
            asked = fresh(load_, 1000 * count + turn)
            found |= {f"{name}_{count}": served(*system, asked, count) for name, system in systems.items()}
        for name, (tokens, seconds, cpu, http) in found.items() if turn else ():
            rates.setdefault(name, []).append([tokens / seconds, tokens / cpu, http / cpu])
    prompts = fresh(load_, -1).prompts[:NUM_FIRST]
    first = {name: [asyncio.run(clients.first_token_s(p)) for p in prompts] for name, (clients, _) in systems.items()}
    middle = {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in rates.items()}
    return {
        "date": str(date.today()), "model": options.shape or options.model, "device": options.device, "dtype": options.dtype,
        "load": options.load, "requests": len(load_.prompts), "tokens": load_.num_tokens, "threads": options.threads,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "tokens_per_s": {name: [round(row[0], 1) for row in rows] for name, rows in rates.items()},
        "tokens_per_cpu_s": {name: [round(row[1], 1) for row in rows] for name, rows in rates.items()},
        "http_share_of_cpu": {name: round(row[2], 4) for name, row in middle.items() if name != "offline"},
        "bars": bars(middle, options),
        "time_to_first_token_s": {name: {"median": round(median(s), 4), "largest": round(max(s), 4)} for name, s in first.items()},
    }  # fmt: skip


def bars(middle: dict[str, list[float]], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What `serve` reaches of the other systems, by tokens a second and by tokens a CPU second."""
    found = {}
    for count in options.clients:
        for other, bar in BARS.items():
            name = other if other == "offline" else f"{other}_{count}"
            if name in middle:
                ratio, per_cpu = (round(a / b, 3) for a, b in zip(middle[f"serve_{count}"][:2], middle[name][:2], strict=True))
                least = bar[options.device]
                found[f"serve_{count}/{name}"] = {
                    "ratio": ratio, "ratio_per_cpu_s": per_cpu, "bar": least, "is_reached": ratio >= least,
                }  # fmt: skip
    return found


if __name__ == "__main__":
    main()
