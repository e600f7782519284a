"""One training step, stage by stage: generation, old log-probs, values, updates, on the real workers in one process.

    python -m benchmarks.step --shape 1.5b --prompts 128 --n 8 --prompt 218 --response 512 --algorithm grpo ppo
    python -m benchmarks.step --shape tiny --prompts 4 --n 4 --prompt 32 --response 16 --device cpu

Random weights of a real shape, forced response lengths, random rewards: what is measured is the work, not the learning. The first step
compiles, captures and warms up, and is shown apart; the others are averaged. --old-log-prob adds the pass that a sampler whose
log-probs are the trainer's own makes unnecessary, --values the one that a batch with one update of the critic does without. What is
offloaded is planned as in training; --memory-gb makes the GPU smaller.
One table for each algorithm, and benchmarks/results/step_*.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.workload import MIXTURES, SHAPES, fixed, model_config
from lockstep.algorithms.kl import make_kl_controller
from lockstep.config.actor_rollout_ref import ActorConfig, ActorRolloutRefConfig, RolloutConfig
from lockstep.config.algorithm import AlgorithmConfig
from lockstep.config.critic import CriticConfig
from lockstep.config.engine import FSDPConfig, ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.models.attention import PACKED
from lockstep.observability.spans import StageTimer
from lockstep.planner.needs import Load
from lockstep.protocol import DataProto
from lockstep.single_controller.base import ClassWithInitArgs, ResourcePool
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.trainer.ppo import stages
from lockstep.trainer.ppo.algorithm import Estimation, PolicyUpdate
from lockstep.trainer.ppo.interfaces import RolloutWorkers
from lockstep.trainer.ppo.prompts import make_prompts
from lockstep.trainer.run.memory import place_models
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from lockstep.workers.training_worker import on_last_token

RESULTS = Path(__file__).parent / "results"
SEED = 0


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    results = {}
    if options.drawn:
        draw_on_device(options)
    if options.memory_gb is not None:
        torch.cuda.set_per_process_memory_fraction(options.memory_gb * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    with tempfile.TemporaryDirectory() as folder:
        _save_model(options, Path(folder), options.drawn)
        for algorithm in options.algorithm:
            results[algorithm] = _measure(algorithm, options, folder)
            print(_table(algorithm, results[algorithm]), flush=True)
    about = _about(options)
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"step_{options.name or options.shape}_{about['date']}.json"
    file.write_text(json.dumps(about | {"steps": results}, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", nargs="+", choices=("grpo", "ppo"), default=["grpo", "ppo"])
    parser.add_argument("--shape", choices=[*SHAPES, *MIXTURES], default="1.5b")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="adapters learn, beside every linear layer but the head"
    )
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--n", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt", type=int, default=218, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=512, help="tokens of a response")
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after one that is not")
    parser.add_argument("--first-prompts", type=int, help="prompts of that one, where it need not be as long")
    parser.add_argument("--max-tokens", type=int, default=32_768, help="tokens of a micro-batch")
    parser.add_argument("--recompute", choices=("none", "auto", "selective", "full"), default="auto")
    parser.add_argument("--compile", action="store_true", help="compile the layers for training")
    parser.add_argument(
        "--drawn",
        action="store_true",
        help="grpo: weights are drawn on the device, not read from files; name --recompute, for auto takes them for somebody else's",
    )
    parser.add_argument("--old-log-prob", action="store_true", help="recompute the old log-probs")
    parser.add_argument("--values", action="store_true", help="ppo: a pass for the values, as where a batch is several updates")
    parser.add_argument("--reference", action="store_true", help="ppo: a reference policy too")
    parser.add_argument("--memory-gb", type=float, help="as if the GPU had no more: torch refuses what goes beyond")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--name", help="of the results file, instead of the shape's")
    return parser


def draw_on_device(options: argparse.Namespace) -> None:
    """From here on, engines of this process have weights that are drawn on the device, in bfloat16 where only adapters learn: the files
    of a large model need not be written and read."""

    def load_whole(spec: EngineSpec) -> PreTrainedModel:
        torch.manual_seed(SEED)
        with spec.device:
            dtype = torch.bfloat16 if options.lora else torch.float32
            model = AutoModelForCausalLM.from_config(spec.hf_config(), dtype=dtype, attn_implementation=PACKED)
        return model.eval()  # models train in evaluation mode

    EngineSpec.load_whole = load_whole  # type: ignore[method-assign]


def _save_model(options: argparse.Namespace, folder: Path, drawn: bool = False) -> None:
    """Random weights as a Hugging Face folder; only the config if the weights are `drawn` on the device."""
    torch.manual_seed(SEED)
    config = model_config(options.shape, max_position_embeddings=options.prompt + options.response)
    if drawn:
        config.save_pretrained(folder)
        return
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)


def _measure(algorithm: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The seconds of each stage, the metrics of the last step, and the start-up."""
    model = ModelConfig(
        path=folder,
        enable_gradient_checkpointing=options.recompute != "none",
        lora_rank=options.lora,
        lora_alpha=max(1, options.lora),
    )
    if options.recompute != "none":
        model.recompute = options.recompute
    fsdp = FSDPConfig(use_torch_compile=options.compile)
    policy = ActorRolloutRefConfig(
        model=model,
        actor=ActorConfig(ppo_max_token_len_per_gpu=options.max_tokens, fsdp_config=fsdp),
        rollout=RolloutConfig(n=options.n, max_num_seqs=min(1024, options.prompts * options.n)),
    )
    classes = {
        "actor_rollout": ClassWithInitArgs(
            ActorRolloutRefWorker, policy, "actor_rollout", seed=SEED, pad_token_id=0, total_updates=100,
            max_response_length=options.response,
        )
    }  # fmt: skip
    if algorithm == "ppo":
        value = CriticConfig(model=model, ppo_max_token_len_per_gpu=options.max_tokens, fsdp_config=fsdp)
        classes["critic"] = ClassWithInitArgs(TrainingWorker, value, "critic", seed=SEED, total_updates=100)
    if algorithm == "ppo" and options.reference:
        classes["ref"] = ClassWithInitArgs(
            ActorRolloutRefWorker, policy, "ref", seed=SEED, pad_token_id=0, total_updates=0, max_response_length=options.response
        )
    started = time.perf_counter()
    with LocalWorkerGroup(ResourcePool([1]), classes, device=options.device, timeout_s=3600, start_timeout_s=600) as group:
        roles = group.spawn()
        rows = options.prompts * options.n
        placed = place_models("global_pool", roles, dict.fromkeys(roles, Load(options.prompt + options.response, rows, rows)))
        print(placed.text or "nothing is offloaded to host memory", flush=True)
        for role in roles.values():
            role.init_model()
        start_up = time.perf_counter() - started
        smaller = argparse.Namespace(**vars(options) | {"prompts": options.first_prompts or options.prompts})
        runs = [_step(step, roles, policy, options if step else smaller, algorithm) for step in range(1 + options.steps)]
    first, *rest = (seconds for seconds, _ in runs)
    return {
        "start_up_s": round(start_up, 2),
        "first_step_s": {name: round(s, 3) for name, s in first.items()},
        "stage_s": {name: round(sum(run[name] for run in rest) / len(rest), 4) for name in rest[0]} if rest else {},
        "metrics": {name: round(value, 5) for name, value in runs[-1][1].items() if name.startswith(("perf/", "actor/log_ratio"))},
        "tokens": options.prompts * options.n * (options.prompt + options.response),
    }


def _step(
    step: int, roles: dict[str, Any], policy: ActorRolloutRefConfig, options: argparse.Namespace, algorithm: str
) -> tuple[dict[str, float], dict[str, float]]:
    load = fixed(options.prompts, 1, options.prompt, options.response, seed=step)
    dataset = [{"prompt_ids": ids, "index": i} for i, ids in enumerate(load.prompts)]
    config = AlgorithmConfig(adv_estimator="gae" if algorithm == "ppo" else "grpo")
    rows = [torch.arange(options.prompts * options.n)]
    actor, critic, ref, timer = roles["actor_rollout"], roles.get("critic"), roles.get("ref"), StageTimer()
    metrics: dict[str, float] = {}
    sampling = SamplingParams(
        temperature=1.0, top_k=-1, top_p=1.0, max_tokens=options.response, stop_token_ids=(), seed=SEED
    )  # fmt: skip
    with timer.stage("step"):
        batch = make_prompts(dataset, range(len(dataset)), options.n, pad_token_id=0)
        with timer.stage("gen"):
            stages.generate(RolloutWorkers(actor), batch, sampling, step)
        _score(batch, step)
        if options.old_log_prob:
            with timer.stage("old_log_prob"):
                stages.old_log_prob(actor, batch)
        else:
            stages.use_sampler_log_probs(batch)
        if ref is not None:
            with timer.stage("ref"):
                stages.ref_log_prob(ref, batch)
        estimation = Estimation.of(config)
        stages.shape_rewards(batch, estimation, make_kl_controller("fixed", 0.0, 0.1, 1000))
        if critic is not None and options.values:
            with timer.stage("values"):
                stages.values(critic, batch)
        elif critic is not None:
            with timer.stage("update_critic"):
                metrics |= stages.learn_values(critic, batch, estimation)
        with timer.stage("adv"):
            stages.estimate(batch, estimation)
        if critic is not None and options.values:
            with timer.stage("update_critic"):
                metrics |= stages.update_critic(critic, batch, rows)
        with timer.stage("update_actor"):
            metrics |= stages.update_actor(actor, batch, rows, PolicyUpdate.of(policy.actor))
    print(f"step {step}: " + "  ".join(f"{name} {seconds:.3f} s" for name, seconds in timer.seconds.items()), flush=True)
    return timer.seconds, metrics


def _score(batch: DataProto, step: int) -> None:
    scores = torch.rand(len(batch), generator=torch.Generator().manual_seed(step))
    batch.set("token_level_scores", on_last_token(scores, batch.ragged("responses")))


def _table(algorithm: str, result: dict[str, Any]) -> str:
    lines = [
        f"{algorithm}: {result['tokens']} tokens per step; {result['start_up_s']} s to start",
        f"{'stage':16}{'first':>10}{'then':>10}",
    ]
    for name, seconds in result["first_step_s"].items():
        lines.append(f"{name:16}{seconds:10.3f}{result['stage_s'].get(name, float('nan')):10.3f}")
    lines += [f"{name} = {value}" for name, value in result["metrics"].items()]
    return "\n".join(lines)


def _about(options: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    on_gpu = options.device == "cuda"
    return {
        "date": date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if on_gpu else f"{platform.processor()} x {torch.get_num_threads()}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()},
        "commit": commit or "unknown",
        "arguments": vars(options),
    }


if __name__ == "__main__":
    main()
