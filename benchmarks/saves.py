"""What saving costs: how long an update waits for a checkpoint, written at once and in the background.

    python -m benchmarks.saves --shape 0.5b --updates 10
    python -m benchmarks.saves --shape tiny --device cpu

Random weights of a real shape on one device; an update is a pass over random rows with a plain loss. `wait_s` is the time that the run
stands still for a save, `update_s` the mean of all updates that are done while a save is being written in the background, against
updates without. Prints, and writes benchmarks/results/saves_*.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.workload import SHAPES
from lockstep.config.engine import EngineChoice, ModelConfig, OptimConfig
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.base import TokenOutputs, TokenRows, TrainEngine
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.share_writer import ShareWriter
from lockstep.workers.engine.spec import EngineSpec

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        engine = _engine(options, Path(folder) / "model", device)
        result = _measure(engine, options, Path(folder), device)
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu"
    about = {"shape": options.shape, "device": name, "torch": torch.__version__, "date": str(date.today())}
    print(json.dumps(about | result, indent=1))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"saves_{options.shape}_{device.type}.json").write_text(json.dumps(about | result, indent=1) + "\n")
    dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument(
        "--updates", type=int, default=5, help="measured updates without a save, before the saves and again after them"
    )
    parser.add_argument("--saves", type=int, default=2, help="measured saves in the background")
    parser.add_argument("--at-once", type=int, default=1, help="measured saves that are written at once")
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
        total_updates=100,
        device=device,
        seed=0,
    )
    return make_engine(EngineChoice("fsdp2"), spec)


def _measure(engine: TrainEngine, options: argparse.Namespace, folder: Path, device: torch.device) -> dict[str, Any]:
    ids = torch.randint(2, 500, (options.rows, 512))
    rows = DataProto.from_dict({"prompts": Ragged.from_rows(list(ids[:, :128])), "responses": Ragged.from_rows(list(ids[:, 128:]))})

    def loss(outputs: TokenOutputs, tokens: TokenRows) -> tuple[Tensor, dict[str, Any]]:
        return -outputs.log_probs.sum() / options.rows / 384, {}

    def update() -> None:
        engine.forward_backward(rows, loss, Budget(32_768, None))
        engine.optim_step()

    writer = ShareWriter(device)

    def save(in_background: bool) -> float:
        writer.wait()
        shutil.rmtree(folder / "saved", ignore_errors=True)  # before the clock starts: a run writes into a new folder
        started = time.perf_counter()
        writer.begin(in_background)
        engine.save(folder / "saved", writer)
        writer.finish(folder / "saved" / "rank_0.written")
        return time.perf_counter() - started

    update()
    first = save(in_background=True)  # makes the host memory that later saves use again
    writer.wait()
    at_once = [save(in_background=False) for _ in range(options.at_once)]
    plain = [_seconds(device, update) for _ in range(options.updates)]
    waits, beside, written = [], [], []
    for _ in range(options.saves):
        waits.append(save(in_background=True))
        started = time.perf_counter()
        while not writer.is_done:
            beside.append(_seconds(device, update))
        written.append(time.perf_counter() - started)
    plain += [_seconds(device, update) for _ in range(options.updates)]
    assert writer.wait() is None, writer.error
    return {
        "bytes": sum(file.stat().st_size for file in (folder / "saved").rglob("*") if file.is_file()),
        "at_once": {"wait_s": _rounded(at_once)},
        "in_background": {"wait_s": _rounded(waits), "first_wait_s": round(first, 3), "then_written_in_s": _rounded(written)},
        "share_of_the_wait": round(median(waits) / median(at_once), 4),
        "update_s": {"without": round(mean(plain), 4), "beside_a_save": round(mean(beside), 4), "each_beside": _rounded(beside)},
        "slowdown": round(mean(beside) / mean(plain) - 1, 4),
    }


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in seconds]


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
