"""What never changes the result, switched on and off: 50 updates of one policy on the same rows, every switch against the plain run.

    python -m benchmarks.switches --device cpu
    python -m benchmarks.switches --device cuda --shape 0.5b --compile

The plain run computes one row at a time, keeps every activation, shares no prompt and compiles nothing. Each other run turns one switch
(the last turns all); the table shows the largest difference of loss and gradient norm over the updates, relative to the largest seen.
In float32 what is left is the order of additions, in bfloat16 its rounding; both grow as the runs drift apart.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.step import RESULTS, _about
from benchmarks.workload import SHAPES
from lockstep.algorithms.aggregation import Denominators
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.engine import EngineChoice, FSDPConfig, ModelConfig, OptimConfig
from lockstep.models import packing
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base.host import WorkerHost
from lockstep.single_controller.base.worker import WorkerEnvironment
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.losses import make_policy_loss

GROUPS, SAMPLES = 4, 4


@dataclass(frozen=True)
class Switches:
    """One run's settings."""

    packed: bool = False
    recompute: str | None = None
    shared: bool = False
    compiled: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--compile", action="store_true", help="also with compiled layers")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    options = parser.parse_args()
    runs = {
        "packed": Switches(packed=True),
        "recompute full": Switches(packed=True, recompute="full"),
        "recompute selective": Switches(packed=True, recompute="selective"),
        "prompts shared": Switches(packed=True, shared=True),
        "all": Switches(packed=True, recompute="full", shared=True, compiled=options.compile),
    }
    if options.compile:
        runs["compiled"] = Switches(packed=True, compiled=True)
    with tempfile.TemporaryDirectory() as folder:
        _save(options, folder)
        plain = _train(options, folder, Switches())
        results = {name: _differences(_train(options, folder, switches), plain) for name, switches in runs.items()}
    print(f"{options.updates} updates, loss from {plain[0][0]:.4f} to {plain[-1][0]:.4f}")
    print(f"{'switch':22}{'loss':>12}{'grad norm':>12}")
    for name, (loss, norm) in results.items():
        print(f"{name:22}{loss:12.2e}{norm:12.2e}")
    name = f"switches_{options.shape}_{options.device}"
    options.algorithm = []
    (RESULTS / f"{name}.json").write_text(
        json.dumps(_about(options) | {"plain": plain, "largest_difference": results}, indent=1) + "\n"
    )


def _save(options: argparse.Namespace, folder: str) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[options.shape], max_position_embeddings=1024)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _rows(vocabulary: int, update: int) -> DataProto:
    """Groups of samples of one prompt each, of different lengths."""
    generator = torch.Generator().manual_seed(update)
    prompts = [torch.randint(0, vocabulary, (40 + 7 * group,), generator=generator) for group in range(GROUPS)]
    lengths = torch.randint(8, 60, (GROUPS * SAMPLES,), generator=generator).tolist()
    columns: dict[str, Any] = {
        "prompts": Ragged.from_rows([prompts[row // SAMPLES] for row in range(len(lengths))]),
        "responses": Ragged.from_rows([torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]),
    }
    responses = columns["responses"]
    columns["response_mask"] = responses.like(torch.ones_like(responses.values))
    columns["old_log_probs"] = responses.like(torch.full(responses.values.shape, -torch.tensor(float(vocabulary)).log().item()))
    columns["advantages"] = responses.like(torch.randn(len(lengths), generator=generator).repeat_interleave(responses.lengths))
    return DataProto.from_dict(columns)


def _train(options: argparse.Namespace, folder: str, switches: Switches) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each update."""
    packing.MIN_SHARED, packing.MAX_LONGER = 1 if switches.shared else 1 << 30, 1 << 30
    actor = ActorConfig()
    device, host = torch.device(options.device), WorkerHost()
    host.setup(WorkerEnvironment(device=device, name="switches"), start_timeout_s=600, timeout_s=600)
    try:
        engine = make_engine(
            EngineChoice("fsdp2", fsdp_config=FSDPConfig(dtype=options.dtype, use_torch_compile=switches.compiled)),
            EngineSpec(
model=ModelConfig(path=folder, enable_gradient_checkpointing=switches.recompute is not None,
                              recompute=switches.recompute or "auto"),
            head=Head.LANGUAGE_MODEL, optim=OptimConfig(lr=1e-4), total_updates=options.updates, device=device, seed=0,
))  # fmt: skip
        vocabulary = engine.folder.hf_config.vocab_size
        curve = []
        for update in range(options.updates):
            rows = _rows(vocabulary, update % 5)
            counts = Denominators(tokens=int(rows.ragged("response_mask").values.sum()), sequences=len(rows))
            budget = Budget(100_000, None if switches.packed else 1)
            metrics = engine.forward_backward(rows, make_policy_loss(actor, 1.0).of(counts), budget)
            curve.append((metrics["actor/loss"].value, engine.optim_step().grad_norm))
        return curve
    finally:
        host.close()


def _differences(curve: list[tuple[float, float]], plain: list[tuple[float, float]]) -> list[float]:
    """Largest difference of each number, relative to the largest seen in the plain run."""
    mine, want = torch.tensor(curve), torch.tensor(plain)
    return ((mine - want).abs().amax(0) / want.abs().amax(0)).tolist()


if __name__ == "__main__":
    main()
