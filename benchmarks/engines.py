"""One update of the same rows in every training engine, on one device: seconds, tokens a second, MFU, peak memory.

    python -m benchmarks.engines --shape 1.5b --prompts 16
    python -m benchmarks.engines --shape tiny --prompts 2 --prompt 32 --response 16 --strategy fsdp fsdp2 veomni --device cpu

Random weights and rows of a fixed length. Each engine runs in a process of its own; an engine that cannot run here has its error in the
table. One update is not measured; the others are averaged. After each engine its row of benchmarks/results/engines.json (on a CPU:
engines_cpu.json) is written, with the commit; rows of other engines on the same hardware stay.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.step import RESULTS, _about, _save_model
from benchmarks.workload import SHAPES, fixed
from lockstep.algorithms.aggregation import Denominators
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.engine import STRATEGIES, EngineChoice, ModelConfig, OptimConfig
from lockstep.models.flops import peak_flops
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base.host import WorkerHost
from lockstep.single_controller.base.worker import WorkerEnvironment
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.losses import make_policy_loss


def main() -> None:
    options = _parser().parse_args()
    about = _about(options)
    commit = about.pop("commit")
    file = RESULTS / f"engines{'' if options.device == 'cuda' else '_cpu'}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    engines: dict[str, Any] = before["engines"] if before.get("hardware") == about["hardware"] else {}
    with tempfile.TemporaryDirectory() as folder:
        _save_model(options, Path(folder))
        for strategy in options.strategy:
            engines[strategy] = _in_a_process(strategy, options, folder) | {"commit": commit}
            print(_line(strategy, engines[strategy]), flush=True)
            file.write_text(json.dumps(about | {"engines": engines}, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--n", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt", type=int, default=218, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=512, help="tokens of a response")
    parser.add_argument("--updates", type=int, default=2, help="measured updates, after one that is not")
    parser.add_argument("--max-tokens", type=int, default=24_576, help="tokens of a micro-batch")
    parser.add_argument("--recompute", choices=("none", "auto", "selective", "full"), default="none")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one engine may take")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def _in_a_process(strategy: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """What `_measure` returns, or the error. Libraries that lay out a process once do not meet each other."""
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    process = context.Process(target=_report, args=(queue, strategy, options, folder))
    process.start()
    try:
        return queue.get(timeout=options.timeout)
    except Exception as error:
        return {"error": f"{type(error).__name__} after {options.timeout} s, exit code {process.exitcode}"}
    finally:
        process.join(timeout=10)
        process.kill()


def _report(queue: Any, strategy: str, options: argparse.Namespace, folder: str) -> None:
    try:
        queue.put(_measure(strategy, options, folder))
    except Exception as error:
        queue.put({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:300]})


def _measure(strategy: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    device, host = torch.device(options.device), WorkerHost()
    on_gpu = device.type == "cuda"
    host.setup(
        WorkerEnvironment(device=torch.device("cuda", 0) if on_gpu else device, name="engines"), start_timeout_s=600, timeout_s=600
    )
    started = time.perf_counter()
    engine = make_engine(
        EngineChoice(strategy),
        EngineSpec(
model=ModelConfig(path=folder, enable_gradient_checkpointing=options.recompute != "none",
                          recompute="auto" if options.recompute == "none" else options.recompute),
        head=Head.LANGUAGE_MODEL, optim=OptimConfig(lr=1e-6), total_updates=10,
        device=torch.device("cuda", 0) if on_gpu else device, seed=0, max_tokens=options.max_tokens,
))  # fmt: skip
    load_s = time.perf_counter() - started
    rows = _rows(options)
    counts = Denominators(tokens=int(rows.ragged("response_mask").values.sum()), sequences=len(rows))
    loss_fn = make_policy_loss(ActorConfig(), 1.0).of(counts)
    seconds, losses = [], []
    for _ in range(1 + options.updates):
        started = time.perf_counter()
        metrics = engine.forward_backward(rows, loss_fn, Budget(options.max_tokens))
        norm = engine.optim_step().grad_norm
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(metrics["actor/loss"].value)
    update_s = sum(seconds[1:]) / options.updates
    tokens = rows.token_counts()
    result = {
        "load_s": round(load_s, 2), "first_update_s": round(seconds[0], 3), "update_s": round(update_s, 3),
        "tokens_per_s": round(int(tokens.sum()) / update_s), "losses": losses, "grad_norm": norm,
    }  # fmt: skip
    if on_gpu:
        peak = peak_flops(torch.cuda.get_device_name())
        flops = engine.cost.training(tokens.tolist(), len(rows.ragged("responses").values))
        result |= {"mfu": round(flops / update_s / peak, 4) if peak else None}
        result |= {"peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1)}
    host.close()
    return result


def _rows(options: argparse.Namespace) -> DataProto:
    load = fixed(options.prompts, 1, options.prompt, options.response, seed=0)
    vocabulary = SHAPES[options.shape]["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    count = options.prompts * options.n
    prompts = [torch.tensor(load.prompts[row // options.n]) for row in range(count)]
    responses = Ragged.from_rows([torch.randint(0, vocabulary, (options.response,), generator=generator) for _ in range(count)])
    advantages = torch.randn(count, generator=generator).repeat_interleave(options.response)
    old = -torch.log(torch.tensor(float(vocabulary))).item()
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows(prompts),
            "responses": responses,
            "response_mask": responses.like(torch.ones_like(responses.values)),
            "old_log_probs": responses.like(torch.full(responses.values.shape, old)),
            "advantages": responses.like(advantages),
        }
    )


def _line(strategy: str, result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{strategy:12} {result['error']}"
    names = ("load_s", "first_update_s", "update_s", "tokens_per_s", "mfu", "peak_gb", "grad_norm")
    return f"{strategy:12} " + "  ".join(f"{name} {result[name]}" for name in names if name in result)


if __name__ == "__main__":
    main()
