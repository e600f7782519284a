"""Updates of the recipes that learn from files, beside GRPO's on the same tokens: seconds and tokens per second of one device.

    python -m benchmarks.updates --shape 1.5b
    python -m benchmarks.updates --recipes grpo --prompt 384 --response 16000 32384 --rows 8 4 --name 1.5b_long
    python -m benchmarks.updates --shape thin --recipes sft --rows 64 --prompt 4 --response 4 --updates 20 --name host
    python -m benchmarks.updates --shape tiny --rows 8 --prompt 32 --response 16 --device cpu

Random weights of a real shape, random tokens, on the real workers in one process. `sft` trains every token but the first of a row;
`dpo` has two responses per prompt, which is computed once; `grpo` is PPO's clipped loss on the very rows of `dpo`, or on `--n` responses
per prompt. Tokens are those that are computed: rows of one prompt share it. The first update compiles and warms up and is left out; the
others are averaged. Several lengths of responses, each with its number of rows, are measured one after the other. What is recomputed and
offloaded is planned as in training. `--profile` adds one update under torch.profiler and the time of each kind of kernel. One table, and
benchmarks/results/updates_*.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import profiled
from benchmarks.step import RESULTS, SEED, _about, _save_model, draw_on_device
from benchmarks.workload import MIXTURES, SHAPES, model_config
from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.rows import Rows
from lockstep.config.actor_rollout_ref import ActorConfig, ActorRolloutRefConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.stage import STAGE_KEYS, stage_optim
from lockstep.models.packing import shared_prompt_tokens
from lockstep.observability.metrics import merge_metrics, values
from lockstep.planner.needs import Load
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base import ClassWithInitArgs, ResourcePool
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.trainer.run.memory import place_models
from lockstep.workers.engine_workers import ActorRolloutRefWorker
from lockstep.workers.losses import make_policy_loss, make_sft_loss
from lockstep.workers.response_losses import make_preference_loss


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        longest = argparse.Namespace(**vars(options) | {"response": max(options.response)})
        _save_model(longest, Path(folder), options.drawn)
        for recipe in options.recipes:
            # A process of its own: what the one before left on the device would be counted as taken.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                results |= pool.submit(_measure, recipe, options, folder).result()
    about = _about(options)
    file = RESULTS / f"updates_{options.name or options.shape}_{about['date']}.json"
    file.write_text(json.dumps(about | {"updates": results}, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=("sft", "dpo", "grpo"), default=["sft", "dpo", "grpo"])
    parser.add_argument("--shape", choices=[*SHAPES, *MIXTURES], default="1.5b")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="adapters learn, beside every linear layer but the head"
    )
    parser.add_argument("--drawn", action="store_true", help="weights are drawn on the device, not read from files")
    parser.add_argument("--rows", type=int, nargs="+", default=[256])
    parser.add_argument("--prompt", type=int, default=218, help="tokens of a prompt")
    parser.add_argument("--response", type=int, nargs="+", default=[512], help="tokens of a response")
    parser.add_argument("--n", type=int, default=2, help="grpo: responses per prompt")
    parser.add_argument("--updates", type=int, default=3, help="measured updates, after one that is not; 0 measures the first")
    parser.add_argument("--max-tokens", type=_tokens, default=32_768, help="tokens of a micro-batch, or auto")
    parser.add_argument("--profile", action="store_true", help="where one more update spends the GPU's time")
    parser.add_argument("--name", help="of the results file, instead of the shape's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def _tokens(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _measure(recipe: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """What was measured of each length, by the recipe's name, and the length where there are several."""
    actor = ActorConfig(ppo_max_token_len_per_gpu=options.max_tokens, optim=stage_optim(1e-5))
    model = ModelConfig(path=folder, lora_rank=options.lora, lora_alpha=max(1, options.lora))
    policy = ActorRolloutRefConfig(model=model, actor=actor)
    if options.drawn:
        draw_on_device(options)
    losses: dict[str, Callable[[], Any]] = {
        "sft": partial(make_sft_loss, "train"),
        "dpo": partial(make_preference_loss, "train", "sigmoid", {"beta": 0.1}),
        "grpo": partial(make_policy_loss, policy.actor, 1.0),
    }
    worker = ClassWithInitArgs(
        ActorRolloutRefWorker,
        policy,
        "actor",
        seed=SEED,
        pad_token_id=0,
        total_updates=100,
        make_loss=losses[recipe],
        keys=STAGE_KEYS,
    )
    with LocalWorkerGroup(
        ResourcePool([1]), {"actor": worker}, device=options.device, timeout_s=3600, start_timeout_s=600
    ) as group:
        roles = group.spawn()
        rows = max(options.rows)
        placed = place_models("global_pool", roles, {"actor": Load(options.prompt + max(options.response), rows, rows)})
        print(placed.text or "nothing is offloaded to host memory", flush=True)
        roles["actor"].init_model()
        results = {}
        for number, response in zip(options.rows, options.response, strict=True):
            name = recipe if len(options.response) == 1 else f"{recipe} {response}"
            batches = [_batch(recipe, options, number, response, seed=update) for update in range(1 + options.updates)]
            results[name] = _measure_length(roles["actor"], batches, options)
            shown = "  ".join(f"{key} {value}" for key, value in results[name].items())
            print(f"{name:6} {shown}", flush=True)
    return results


def _measure_length(actor: Any, batches: Sequence[DataProto], options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    found = [_update(actor, batch) for batch in batches]
    (first, _), *rest = found
    rest = rest or found
    tokens = int(batches[-1].token_counts().sum()) - sum(shared_prompt_tokens(batches[-1]))
    mean, metrics = sum(seconds for seconds, _ in rest) / len(rest), found[-1][1]
    return {
        "tokens": tokens,
        "first_s": round(first, 3),
        "update_s": round(mean, 4),
        "tokens_per_s": round(tokens / mean),
        **({"mfu": round(metrics["perf/model_mfu/train"], 4)} if "perf/model_mfu/train" in metrics else {}),
        **({"peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1)} if on_gpu else {}),
        **(profiled(lambda: _update(actor, batches[-1])) if options.profile else {}),
    }


def _update(actor: Any, batch: DataProto) -> tuple[float, dict[str, float]]:
    """The seconds of one update, and its metrics."""
    mask = batch.ragged("response_mask")
    started = time.perf_counter()
    found = actor.update_actor(batch, denominators=Denominators.of(mask.values, Rows(mask.lengths)))
    return time.perf_counter() - started, values(merge_metrics(found))


def _batch(recipe: str, options: argparse.Namespace, rows: int, response: int, seed: int) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model_config(options.shape).vocab_size

    def draw(length: int) -> torch.Tensor:
        return torch.randint(5, vocabulary, (length,), generator=generator)

    if recipe == "sft":
        prompts, responses = [draw(1) for _ in range(rows)], [draw(options.prompt + response - 1) for _ in range(rows)]
    else:
        n = options.n if recipe == "grpo" else 2
        prompts = [prompt for prompt in (draw(options.prompt) for _ in range(rows // n)) for _ in range(n)]
        responses = [draw(response) for _ in range(rows)]
    columns: dict[str, Any] = {"prompts": Ragged.from_rows(prompts), "responses": Ragged.from_rows(responses)}
    flat = columns["responses"].like
    columns["response_mask"] = flat(torch.ones(len(columns["responses"].values), dtype=torch.int64))
    objects: dict[str, Any] = {"index": list(range(len(prompts)))}
    if recipe == "dpo":
        columns["unit"] = torch.arange(rows) // 2
        columns["is_chosen"] = torch.tensor([1, 0] * (rows // 2))
        columns["ref_response_log_prob"] = torch.randn(rows, generator=generator, dtype=torch.float64) - 100
    if recipe == "grpo":
        columns["old_log_probs"] = flat(torch.full((len(columns["responses"].values),), -11.0))
        columns["advantages"] = flat(torch.randn(len(columns["responses"].values), generator=generator))
    return DataProto.from_dict(columns, objects, {"pad_token_id": 0})


if __name__ == "__main__":
    main()
