"""Episodes: what reusing the keys and values of earlier turns saves, and whether slow environments keep the device waiting.

    python -m benchmarks.agents --shape tiny --device cpu --episodes 4 --turns 4 --observation 64 --waiting 16
    python -m benchmarks.agents --shape 0.5b

Random weights of a real shape (or --model) with SmolLM2's tokenizer and template; observations have a fixed number of tokens, and turns of
the policy one that is drawn around a mean (--spread), as those of a model that ends its turns itself. Two loads:

- reuse: episodes of --turns turns whose environments answer at once, with observations of --observation tokens: as they are played, against
  computing the whole conversation anew for each turn. The tokens must be the same in float32 (--check episodes; their ids are compared,
  greedily: random weights spread the probability so evenly that the last bit of a sum decides on every few hundredth token that is drawn);
  in bfloat16 other shapes round otherwise, so there the share of equal tokens is only shown.
- environments: --waiting episodes at once whose environments take 50 ms to 2 s for an answer, by the seed, against the same episodes whose
  environments answer at once. Busy is the share of the time in which the GPU computed, as nvidia-smi sees it, while at least half of the
  episodes run; on a CPU, that in which a request was in flight. Late is how long a reply that was there waited until its episode's next
  request was made: without rounds it is milliseconds, whatever the others do.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config

from benchmarks.rollout import RESULTS, SEED, _about
from benchmarks.workload import SHAPES
from lockstep.agents import Action, Environment, Turn
from lockstep.agents.chat_template import TurnTemplate
from lockstep.agents.episode import Episode
from lockstep.agents.parsers import PARSERS
from lockstep.agents.play import EpisodeLimits, EpisodeTask, Player
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.sampling import SamplingParams
from lockstep.models.attention import CACHED
from lockstep.models.load import share_structure
from lockstep.models.source import model_folder
from lockstep.utils.garbage import frozen_objects
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.rollout.registry import make_rollout
from lockstep.workers.rollout.request import Completion, Request

SHORTEST_S, LONGEST_S = 0.05, 2.0
"""How long a slow environment takes for an answer."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer = hf_tokenizer(options.tokenizer)
    result: dict[str, Any] = _about(options, device, dtype)
    model = _model(options, tokenizer, device)  # in float32
    table = []
    if options.check:
        bench = _Bench(model, tokenizer, options)
        result["check"] = _reuse(bench, options.check, 0, temperature=0.0)
        bench.close()
        table.append(_check_line(result["check"]))
        print(table[-1], flush=True)
    bench = _Bench(model.to(dtype), tokenizer, options)
    result["reuse"] = []
    with frozen_objects():  # as in training
        for count in options.episodes:
            result["reuse"].append(_reuse(bench, count, options.repeats))
            table.append(_reuse_line(result["reuse"][-1]))
            print(table[-1], flush=True)
            _write(result, options)
        if options.waiting:
            result["environments"] = _environments(bench, options.waiting)
            table.append(_environments_line(result["environments"]))
    _write(result, options)
    print("\n" + "\n".join(table))


def _write(result: dict[str, Any], options: argparse.Namespace) -> None:
    """What is measured so far."""
    options.out.mkdir(parents=True, exist_ok=True)
    name = options.shape if options.model is None else Path(options.model).name
    (options.out / f"agents_{name}_{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument(
        "--model", help="a Hugging Face folder or smollm2-135m, instead of random weights; with SmolLM2's vocabulary"
    )
    parser.add_argument("--tokenizer", default="smollm2-135m", help="or a folder with a tokenizer and its chat template")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", type=float, default=0.8, help="share of the free GPU memory for the key-value cache")
    parser.add_argument("--episodes", type=int, nargs="*", default=[64, 256], help="of the first load, one measurement each")
    parser.add_argument("--check", type=int, default=4, help="episodes whose tokens are compared in float32; 0: none")
    parser.add_argument("--waiting", type=int, default=256, help="episodes of the second load; 0: not measured")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--observation", type=int, default=512, help="tokens of an observation")
    parser.add_argument("--turn-tokens", type=int, default=32, help="tokens of a turn of the policy, in the first load")
    parser.add_argument("--long-turn-tokens", type=int, default=256, help="the same in the second load")
    parser.add_argument(
        "--spread", type=float, default=0.5, help="turns have up to this share more or fewer tokens; 0: all end together"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="runs of the first load after a short one that compiles and captures"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    return parser


def _model(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> PreTrainedModel:
    if options.model:
        return AutoModelForCausalLM.from_pretrained(model_folder(options.model), dtype=torch.float32).to(device).eval()
    shape = SHAPES[options.shape]
    shape = shape | {"vocab_size": max(shape["vocab_size"], len(tokenizer))}
    config = Qwen2Config(**shape, max_position_embeddings=32_768, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1 if parameter.dim() == 1 else 0.02)
    return model.eval()


# -- environments --------------------------------------------------------------------------------------------------------------


class Talks(Environment):
    """Answers with `length` words, of which each is one token, after a while."""

    def __init__(self, words: list[str], length: int, turns: int, delays: list[float]) -> None:
        self.words, self.length, self.turns, self.delays, self.turn = words, length, turns, delays, 0

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        self.chance = random.Random(seed)
        return Turn([self._message()])

    async def step(self, action: Action) -> Turn:
        if self.delays:
            await asyncio.sleep(self.delays[self.turn])
        self.turn += 1
        return Turn([] if self.turn >= self.turns else [self._message()], done=self.turn >= self.turns)

    def _message(self) -> dict[str, str]:
        return {"role": "user", "content": "".join(self.chance.choices(self.words, k=self.length))}


class _Noted:
    """A stream that notes when requests were added and answered. Without `reuses` nothing of earlier turns is used again."""

    def __init__(self, stream: Any, reuses: bool, spread: float) -> None:
        self._stream, self._lock, self._spread = stream, threading.Lock(), spread
        self.added: dict[int, tuple[float, int]] = {}
        """Index -> when, and which episode."""
        self.answered: dict[int, float] = {}
        if not reuses:
            stream._scheduler.cache = None
            stream._scheduler.resume = lambda prompt, index: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _Noted:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def add(self, request: Request) -> int:
        if request.max_tokens is not None:  # by the episode and what it says, not by the time
            said = str(request.key).encode() + request.prompt_ids.numpy().tobytes()
            chance = random.Random(said).uniform(1 - self._spread, 1 + self._spread)
            request = replace(request, max_tokens=max(1, round(request.max_tokens * chance)))
        with self._lock:
            index = self._stream.add(request)
            self.added[index] = time.perf_counter(), request.key[1]
        return index

    def next(self, timeout_s: float | None = None) -> Any:
        answer = self._stream.next(timeout_s)
        if isinstance(answer, Completion):
            self.answered[answer.index] = time.perf_counter()
        return answer


class _Bench:
    """Plays episodes on one model."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> None:
        self.options, self._tokenizer, self._template = options, tokenizer, TurnTemplate(tokenizer, {})
        seats = max(*options.episodes, options.check, options.waiting)
        config = RolloutConfig(max_num_seqs=seats, gpu_memory_utilization=options.memory)
        self._engine: Any = make_rollout(share_structure(model, CACHED), config, 0)
        names = (" one", " two", " red", " blue", " small", " large", " house", " river", " stone", " paper", " light", " water")
        self._words = [name for name in names if len(tokenizer(name, add_special_tokens=False)["input_ids"]) == 1]
        self.noted: Any = None

    def close(self) -> None:
        """Give the memory of pages back."""
        self._engine.sleep()

    def warm_up(self, count: int) -> None:
        """Compile and capture the steps of all batch sizes, and the prefills, that environments with delays lead to."""
        turns = min(3, self.options.turns)  # contexts become long, which has steps of its own
        for size in (256, 224, 192, 160, 128, 96, 64, 48, 32, *(16, 14, 12, 10, 8, 6, 4, 3, 2) * 2):
            self.play(min(size, count), 9, turns=turns)

    def play(
        self,
        count: int,
        turn_tokens: int,
        delays: list[list[float]] | None = None,
        reuses: bool = True,
        temperature: float = 1.0,
        turns: int | None = None,
    ) -> list[Episode]:
        """Play `count` episodes at once. `delays[episode][turn]` are those of the environments; None: they answer at once. They have
        `turns` turns instead of --turns."""
        options, bench = self.options, self
        room = options.turns * (math.ceil(turn_tokens * (1 + options.spread)) + options.observation + 64)
        sampling = SamplingParams(temperature=temperature, max_tokens=room, stop_token_ids=(), seed=SEED)
        limits = EpisodeLimits(options.turns, turn_tokens, None, count, 600.0, 3600.0, 0)

        class Engine:
            """What a Player asks of one."""

            context = self._engine.context

            def open(self, sampling: SamplingParams) -> Any:
                # Twice: without reuse a turn that is kept and the one that goes on after it have pages of their own.
                bench.noted = _Noted(bench._engine.open(sampling, num_tokens=2 * count * (room + 64)), reuses, options.spread)
                return bench.noted

        kwargs = {"words": self._words, "length": options.observation, "turns": turns or options.turns}
        tasks = [
            EpisodeTask({}, [0], (0, i, 0), i, Talks, kwargs | {"delays": delays[i] if delays else []}, self._template, {})
            for i in range(count)
        ]
        player = Player(Engine(), self._tokenizer, PARSERS["hermes"].parse, sampling, limits)  # type: ignore[arg-type]
        episodes = player.play(tasks)
        wrong = [episode.error or episode.finish_reason for episode in episodes if episode.finish_reason != "stop"]
        assert not wrong, f"{len(wrong)} episodes were not played to their end: {wrong[0]}"
        return episodes


# -- the loads -----------------------------------------------------------------------------------------------------------------


def _reuse(bench: _Bench, count: int, repeats: int, temperature: float = 1.0) -> dict[str, Any]:
    """Both ways in turn, the fastest of `repeats` each after a short first run, and how far their tokens agree."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    processor: dict[bool, list[float]] = {True: [], False: []}
    episodes: dict[bool, list[Episode]] = {}
    if repeats:  # compile and capture
        for reuses in (True, False):
            bench.play(count, bench.options.turn_tokens, reuses=reuses, turns=min(4, bench.options.turns))
    for _ in range(max(1, repeats)):
        for reuses in (True, False):
            start, start_cpu = time.perf_counter(), time.process_time()
            episodes[reuses] = bench.play(count, bench.options.turn_tokens, reuses=reuses, temperature=temperature)
            seconds[reuses].append(time.perf_counter() - start)
            processor[reuses].append(time.process_time() - start_cpu)
    pairs = list(zip(episodes[True], episodes[False], strict=True))
    policy = sum(sum(episode.mask) for episode in episodes[True])
    equal = sum(a == b and x == y == 1 for e, f in pairs for a, b, x, y in zip(e.ids, f.ids, e.mask, f.mask, strict=False))
    kept, anew = min(seconds[True]), min(seconds[False])
    return {
        "episodes": count, "turns": bench.options.turns, "observation": bench.options.observation,
        "turn_tokens": bench.options.turn_tokens, "reuse_s": kept, "anew_s": anew, "ratio": anew / kept,
        "all_s": {"reuse": seconds[True], "anew": seconds[False]}, "processor_s": {"reuse": processor[True], "anew": processor[False]},
        "processor_ratio": min(processor[False]) / min(processor[True]),
        "equal_episodes": sum(e.ids == f.ids for e, f in pairs), "policy_tokens": policy, "equal_tokens": equal,
    }  # fmt: skip


def _environments(bench: _Bench, count: int) -> dict[str, Any]:
    rng, turns, tokens = random.Random(SEED), bench.options.turns, bench.options.long_turn_tokens
    delays = [[rng.uniform(SHORTEST_S, LONGEST_S) for _ in range(turns)] for _ in range(count)]
    bench.warm_up(count)
    found: dict[str, Any] = {"episodes": count, "turns": turns, "turn_tokens": tokens, "observation": bench.options.observation}
    played = {}
    for name, own in (("at_once", None), ("slow", delays)):
        with _Utilisation(bench.options.device) as used:
            start = time.perf_counter()
            played[name] = bench.play(count, tokens, own)
            seconds = time.perf_counter() - start
        found[name] = _account(bench.noted, own, turns, used, seconds)
        print(name, json.dumps(found[name]), flush=True)
    pairs = zip(played["at_once"], played["slow"], strict=True)
    found["equal_episodes"] = sum(a.ids == b.ids for a, b in pairs)
    found["busy_ratio"] = found["slow"]["busy"] / found["at_once"]["busy"]
    found["time_ratio"] = found["at_once"]["seconds"] / found["slow"]["seconds"]
    return found


def _account(noted: _Noted, delays: list[list[float]] | None, turns: int, used: _Utilisation, seconds: float) -> dict[str, Any]:
    """What the times of requests say. The window ends when half of the episodes have had their last answer."""
    of_episode: dict[int, list[int]] = {}
    for index, (_, episode) in sorted(noted.added.items()):
        of_episode.setdefault(episode, []).append(index)
    ends = sorted(noted.answered[own[-1]] for own in of_episode.values())
    start, end = min(at for at, _ in noted.added.values()), ends[len(ends) // 2]
    changes = [(at, 1) for at, _ in noted.added.values()] + [(at, -1) for at in noted.answered.values()]
    busy, rows, before, flying = 0.0, 0.0, start, 0
    for at, change in sorted(changes):
        span = max(0.0, min(at, end) - min(before, end))
        busy, rows, before = busy + span * (flying > 0), rows + span * flying, at
        flying += change
    late = sorted(
        noted.added[following][0] - noted.answered[index] - (delays[episode][turn] if delays else 0.0)
        for episode, own in of_episode.items()
        for turn, (index, following) in enumerate(itertools.pairwise(own))
    )
    window, seen = end - start, used.share(start, end)
    return {
        "seconds": seconds, "window_s": window, "busy": busy / window if seen is None else seen, "mean_in_flight": rows / window,
        "late_median_s": statistics.median(late) if late else 0.0, "late_p99_s": late[len(late) * 99 // 100] if late else 0.0,
    }  # fmt: skip


class _Utilisation:
    """Asks nvidia-smi how busy the device is, ten times a second; nothing on a CPU."""

    def __init__(self, device: str) -> None:
        self._wanted, self._seen = device.startswith("cuda"), list[tuple[float, float]]()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Utilisation:
        if self._wanted:
            command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._listen, daemon=True).start()
        return self

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._seen.append((time.perf_counter(), float(line)))

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def share(self, start: float, end: float) -> float | None:
        """The mean between two times; None where nothing was seen."""
        found = [value / 100 for at, value in self._seen if start <= at <= end]
        return statistics.mean(found) if found else None


# -- the table -----------------------------------------------------------------------------------------------------------------


def _check_line(row: dict[str, Any]) -> str:
    return f"float32: {row['equal_episodes']} of {row['episodes']} episodes have the same tokens with and without reuse"


def _reuse_line(row: dict[str, Any]) -> str:
    # On a machine that does other things too, processor seconds say more.
    return (
        f"reuse: {row['episodes']} episodes of {row['turns']} turns, observations of {row['observation']}: {row['reuse_s']:.2f} s, "
        f"anew {row['anew_s']:.2f} s, {row['ratio']:.2f} times as fast ({row['processor_ratio']:.2f} by processor seconds); "
        f"{row['equal_tokens']} of {row['policy_tokens']} tokens equal"
    )


def _environments_line(row: dict[str, Any]) -> str:
    lines = [f"{'environments':14}{'s':>8}{'window s':>10}{'busy':>7}{'in flight':>11}{'late median / p99 ms':>22}"]
    for name in ("at_once", "slow"):
        own = row[name]
        late = f"{1e3 * own['late_median_s']:.1f} / {1e3 * own['late_p99_s']:.1f}"
        lines.append(
            f"{name:14}{own['seconds']:8.2f}{own['window_s']:10.2f}{own['busy']:7.2f}{own['mean_in_flight']:11.1f}{late:>22}"
        )
    lines.append(f"busy, slow of at once: {row['busy_ratio']:.2f}; {row['equal_episodes']} of {row['episodes']} episodes equal")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
