"""Many episodes with environments that hang, die, leak, print and return nonsense: `python -m tests.agents.broken --count 1000`.

None may be lost without a count, no process may be left, and memory must stay flat. Exits with 1 where that is not so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.broken_environments import FAILS, WORKS, Broken
from helpers.chat_model import save_chat_model
from transformers import AutoModelForCausalLM

from lockstep.agents.chat_template import TurnTemplate
from lockstep.agents.episode import Episode
from lockstep.agents.parsers import PARSERS
from lockstep.agents.play import EpisodeLimits, EpisodeTask, Player
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.sampling import SamplingParams
from lockstep.generation.engine import NativeRollout
from lockstep.utils.tokenizer import hf_tokenizer

MARK = "LOCKSTEP_BROKEN_EPISODES"


def make_player(folder: Path, environments: int, timeout_s: float) -> tuple[Player, TurnTemplate]:
    """A tiny model, and what it needs to play."""
    save_chat_model(folder)
    tokenizer = hf_tokenizer(str(folder))
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NativeRollout.attention).eval()
    engine = NativeRollout(module, RolloutConfig(), tokenizer.pad_token_id, tokenizer.decode)
    sampling = SamplingParams(temperature=1.0, max_tokens=120, stop_token_ids=(tokenizer.eos_token_id,), seed=0)
    limits = EpisodeLimits(4, 8, None, environments, timeout_s, 100.0, 0)
    return Player(engine, tokenizer, PARSERS["hermes"].parse, sampling, limits), TurnTemplate(tokenizer, {})


def kinds_of(count: int, share: float) -> list[str]:
    """What each episode is to go through: `share` of them fail, every kind in turn."""
    failing = [FAILS[i % len(FAILS)] for i in range(round(count * share))]
    working = [WORKS[i % len(WORKS)] for i in range(count - len(failing))]
    mixed = sorted(enumerate(failing + working), key=lambda item: item[0] * 7919 % 10007)
    return [kind for _, kind in mixed]


def play(player: Player, template: TurnTemplate, kinds: list[str], start: int = 0) -> list[Episode]:
    """An episode for each kind."""
    tasks = [
        EpisodeTask({"prompt": "?"}, [1, 2], (0, start + i, 0), start + i, Broken, {"how": kind}, template, {})
        for i, kind in enumerate(kinds)
    ]
    return player.play(tasks)


def faults_of(kinds: list[str], episodes: list[Episode]) -> list[str]:
    """What is not as it must be."""
    faults = [] if len(episodes) == len(kinds) else [f"{len(kinds) - len(episodes)} episodes are lost"]
    for kind, episode in zip(kinds, episodes, strict=False):
        if kind in FAILS and (episode.error is None or episode.ids or episode.finish_reason != "error"):
            faults.append(f"{kind}: should be missing, is {episode.finish_reason} with {len(episode.ids)} tokens")
        if kind in WORKS and (episode.error is not None or not episode.turns):
            faults.append(f"{kind}: should be played, is missing: {episode.error}")
    return faults


def processes() -> list[str]:
    """Commands of other processes that come from this one, whoever their parent is now."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if f"{MARK}={os.getpid()}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
            except OSError:  # gone, or another user's
                continue
    return found


def resources() -> dict[str, float]:
    """Memory of this process in MB, its threads and open files."""
    gc.collect()
    memory = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return {
        "memory_mb": round(int(memory.split()[1]) / 1024, 1),
        "threads": threading.active_count(),
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--block", type=int, default=100, help="episodes between two looks at memory")
    parser.add_argument("--environments", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=5.0, help="deadline of each call, in seconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ[MARK] = str(os.getpid())
    faults, seen, missing, started = list[str](), [resources()], Counter[str](), time.monotonic()
    kinds = kinds_of(args.count, 0.5)
    with tempfile.TemporaryDirectory() as folder:
        player, template = make_player(Path(folder), args.environments, args.timeout)
        for start in range(0, args.count, args.block):
            block = kinds[start : start + args.block]
            episodes = play(player, template, block, start)
            faults += faults_of(block, episodes)
            missing.update(kind for kind, episode in zip(block, episodes, strict=True) if episode.error is not None)
            left = processes()
            faults += [f"a process is left: {command}" for command in left]
            seen.append(resources() | {"processes_left": len(left)})
            print(f"{start + len(block)} episodes, {missing.total()} missing, {seen[-1]}", flush=True)
    grown = seen[-1]["memory_mb"] - seen[1]["memory_mb"]
    if grown > 50 or seen[-1]["threads"] > seen[1]["threads"] + 2 or seen[-1]["files"] > seen[1]["files"] + 8:
        faults.append(f"resources grow: from {seen[1]} to {seen[-1]}")
    result = {
        "episodes": args.count,
        "missing": missing.total(),
        "missing_by_kind": dict(sorted(missing.items())),
        "played": args.count - missing.total(),
        "resources": seen,
        "seconds": round(time.monotonic() - started),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "faults": faults,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(faults) or f"none lost, no process left, memory flat ({grown:+.0f} MB)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
