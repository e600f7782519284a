"""What saving costs: how long an update waits for a checkpoint, written at once and in the background.

    python -m benchmarks.saves --shape 0.5b
    python -m benchmarks.saves --shape tiny --device cpu

Random weights of a real shape on one device; an update is a pass over random rows with a plain loss. `wait_s` is the time that the run
stands still for a save. Of the saves in the background the first makes the host memory, so its wait is apart (`first_wait_s`).

Blocks of updates without a save and beside one that is being written in the background take turns, the first and the last without: what
the device's clock does meanwhile is on both sides. An update is beside a save that is not done when the update begins. `slowdown` is the
mean of all updates beside a save over the mean of all others, minus 1. Prints, and writes benchmarks/results/saves_*.json with the time
of every update. On an H200 a save of 0.5b takes 12 to 14 s and an update 0.33 s: 75 s in all, and the start.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.workload import SHAPES
from lockstep.config.engine import EngineChoice, ModelConfig, OptimConfig
from lockstep.models.chunked_head import LossOutput
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.protocol import DataProto, Ragged
from lockstep.utils.garbage import frozen_objects
from lockstep.workers.engine.base import TokenOutputs, TokenRows, TrainEngine
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.share_writer import ShareWriter
from lockstep.workers.engine.spec import EngineSpec

RESULTS = Path(__file__).parent / "results"
_WARM_UP = 3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.updates < 1 or options.saves < 2 or options.at_once < 1:
        parser.error("--updates and --at-once have to be 1 or more, --saves 2 or more")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        engine = _engine(options, Path(folder) / "model", device)
        result = _measure(engine, options, Path(folder) / "saved", device)
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu"
    about = {"shape": options.shape, "device": name, "torch": torch.__version__, "date": str(date.today())}
    each = {name: result["update_s"][name] for name in ("each_without", "each_beside")}
    print(json.dumps(about | result | {"update_s": {k: v for k, v in result["update_s"].items() if k not in each}}, indent=1))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"saves_{options.shape}_{device.type}.json").write_text(json.dumps(about | result, indent=1) + "\n")
    dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--updates", type=int, default=15, help="of a block without a save: before each save and after the last")
    parser.add_argument("--saves", type=int, default=3, help="in the background, at least 2: the first makes the host memory")
    parser.add_argument("--at-once", type=int, default=1, help="saves that are written at once")
    parser.add_argument("--rows", type=int, default=64, help="of 512 tokens in an update")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", help="where to write; the system's folder for temporary files unless it is given")
    return parser


def _engine(options: argparse.Namespace, path: Path, device: torch.device) -> TrainEngine:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPES[options.shape], max_position_embeddings=512))
    model.save_pretrained(path)
    del model
    spec = EngineSpec(
        model=ModelConfig(path=str(path)),
        head=Head.LANGUAGE_MODEL,
        optim=OptimConfig(lr=1e-6),
        total_updates=10_000,
        device=device,
        seed=0,
    )
    return make_engine(EngineChoice("fsdp2"), spec)


def _measure(engine: TrainEngine, options: argparse.Namespace, folder: Path, device: torch.device) -> dict[str, Any]:
    update, writer = _update_of(engine, options.rows), ShareWriter(device)

    def save(in_background: bool) -> float:
        _wait(writer)
        shutil.rmtree(folder, ignore_errors=True)  # before the clock starts: a run writes into a new folder
        started = time.perf_counter()
        writer.begin(in_background)
        engine.save(folder, writer)
        writer.finish(folder / "rank_0.written")
        return time.perf_counter() - started

    def block_without() -> list[float]:
        return _said("without a save", [_seconds(device, update) for _ in range(options.updates)])

    for _ in range(_WARM_UP):
        update()
    without, beside, waits, written = [], [], [], []
    with frozen_objects():  # as in a run
        for _ in range(options.saves):
            without.append(block_without())
            waits.append(save(in_background=True))
            started, block = time.perf_counter(), []
            while not writer.is_done:
                block.append(_seconds(device, update))
            written.append(time.perf_counter() - started)
            _wait(writer)
            if not block:
                raise SystemExit("no update began before a save in the background was done; has the host memory for a copy?")
            beside.append(_said("beside a save", block))
        without.append(block_without())
        at_once = [save(in_background=False) for _ in range(options.at_once)]
    _wait(writer)
    first, *waits = waits
    return {
        "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        "at_once": {"wait_s": _rounded(at_once)},
        "in_background": {"wait_s": _rounded(waits), "first_wait_s": round(first, 3), "then_written_in_s": _rounded(written)},
        "share_of_the_wait": round(median(waits) / median(at_once), 4),
    } | _compared(without, beside)


def _update_of(engine: TrainEngine, num_rows: int) -> Callable[[], None]:
    ids = torch.randint(2, 500, (num_rows, 512))
    rows = DataProto.from_dict({"prompts": Ragged.from_rows(list(ids[:, :128])), "responses": Ragged.from_rows(list(ids[:, 128:]))})

    def loss(outputs: TokenOutputs, tokens: TokenRows) -> LossOutput:
        return LossOutput(-outputs.log_probs.sum() / num_rows / 384, {})

    def update() -> None:
        engine.forward_backward(rows, loss, Budget(32_768, None))
        engine.optim_step()

    return update


def _wait(writer: ShareWriter) -> None:
    """Wait until the save is written; one that failed measures nothing."""
    if (error := writer.wait()) is not None:
        raise SystemExit(f"a save failed: {error}")


def _compared(without: Sequence[Sequence[float]], beside: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Updates in blocks -> what they took, and how much longer those beside a save."""
    all_without, all_beside = list(chain(*without)), list(chain(*beside))
    return {
        "update_s": {
            "without": round(mean(all_without), 4),
            "beside_a_save": round(mean(all_beside), 4),
            "blocks_without": [_block(block) for block in without],
            "blocks_beside": [_block(block) for block in beside],
            "each_without": _rounded(all_without, 4),
            "each_beside": _rounded(all_beside, 4),
        },
        "slowdown": round(mean(all_beside) / mean(all_without) - 1, 4),
    }


def _block(seconds: Sequence[float]) -> dict[str, float]:
    return {"updates": len(seconds), "mean": round(mean(seconds), 4), "median": round(median(seconds), 4)}


def _said(name: str, seconds: list[float]) -> list[float]:
    print(f"{len(seconds):3} updates {name:14}  mean {mean(seconds):.4f} s  median {median(seconds):.4f} s", flush=True)
    return seconds


def _rounded(seconds: Sequence[float], digits: int = 3) -> list[float]:
    return [round(value, digits) for value in seconds]


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
