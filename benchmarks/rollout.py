"""Generation: how many response tokens a second an engine makes, on the loads of benchmarks/workload.py.

    python -m benchmarks.rollout --engine native --shape 1.5b --load fixed gsm8k_like long_tail
    python -m benchmarks.rollout --engine native hf --shape tiny --device cpu --load fixed --prompts 2
    python -m benchmarks.rollout --shape 0.5b --load long_rows --kv-cache-dtype fp8 --max-num-seqs 32 --repeats 0
    python -m benchmarks.rollout --load fixed --filter "" top_p=0.95 top_k=50,min_p=0.05 repetition_penalty=1.1

Random weights of a real shape (--shape), or a model folder (--model). Response lengths are forced: nothing stops, each request has its own
limit; log-probs are always returned. A rate is that of the fastest of --repeats runs after the first; the first one, which compiles and
captures, is shown apart. --trainer-check N compares the sampler's log-probs of N responses of the first load with the training
engine's. With --filter, every load is measured with each of these ways to sample; with --lora with adapters of each of these ranks beside
the weights.
One table is printed, and benchmarks/results/rollout_*.json written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.workload import LOADS, MIXTURES, SHAPES, Load, model_config
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import FSDPConfig, ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.models.attention import PACKED
from lockstep.models.fast_layers import install_fast_layers
from lockstep.models.load import Head, share_structure
from lockstep.models.lora import AdaptedLinear, Lora, add_adapters
from lockstep.models.packing import Budget
from lockstep.models.source import model_folder
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.fsdp.engine import FSDPEngine
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.rollout.base import RolloutEngine
from lockstep.workers.rollout.registry import make_rollout, process_rollout
from lockstep.workers.rollout.request import Completion, Request

RESULTS = Path(__file__).parent / "results"
SEED = 0

Generate = Callable[[Load], list[Completion]]
Make = Callable[[dict[str, Any]], Generate]
"""Generation with these sampling parameters."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    model = _model(options, device, dtype)
    about = _about(options, device, dtype)
    file = options.out / f"rollout_{options.name or options.shape or Path(options.model).name}_{about['date']}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    rows, starts = [], {}
    for engine, rank in itertools.product(options.engine, options.lora):
        start = time.perf_counter()
        adapters: dict[str, Tensor] = {}
        rollout = _vllm(model, options) if engine == "vllm" else _lockstep(engine, model, options, rank, adapters)
        make = _maker(rollout)
        make({})(Load([[1, 2, 3]], [1]))
        starts[engine] = round(time.perf_counter() - start, 2)
        print(f"{engine}: {starts[engine]} s from a loaded model to the first token", flush=True)
        for name, filtered in itertools.product(options.load, options.filter):
            load = _load(name, options)
            row, completions = _measure(make(_filter(filtered)), load, options.repeats)
            is_first = (engine, name, filtered) == (options.engine[0], options.load[0], options.filter[0])
            if options.trainer_check and is_first:
                check = _trainer_check(model, load, completions, options.trainer_check, rank, adapters)
                row["trainer_log_prob_difference"] = check
            rows.append({"engine": engine, "lora": rank, "load": name, "filter": filtered} | row)
            print(_line(rows[-1]), flush=True)
            # After each: a run that is cut off has what it has measured.
            file.write_text(json.dumps(about | {"first_token_s": starts, "rows": rows}, indent=1) + "\n")
        rollout.sleep()
    print("\n" + "\n".join([_line(None), *map(_line, rows)]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=("native", "hf", "vllm"), default=["native"])
    parser.add_argument("--shape", choices=[*SHAPES, *MIXTURES], default="1.5b")
    parser.add_argument("--model", help="a Hugging Face folder, a .gguf file or smollm2-135m, instead of random weights")
    parser.add_argument("--load", nargs="+", choices=LOADS, default=["fixed", "gsm8k_like", "long_tail"])
    parser.add_argument("--prompts", type=int, help="prompts of a load, instead of its own number")
    parser.add_argument("--n", type=int, help="samples of a prompt, instead of the load's own number")
    parser.add_argument("--response", type=int, help="tokens of a response of the fixed load, instead of 512")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=32_768)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="type of keys and values")
    parser.add_argument("--memory", type=float, default=0.8, help="share of the free GPU memory for the key-value cache")
    parser.add_argument("--repeats", type=int, default=2, help="measured runs after the first; 0 measures the first")
    parser.add_argument("--trainer-check", type=int, default=0, metavar="N")
    parser.add_argument(
        "--generic-layers", action="store_true", help="the native engine's way for all families, also where it has fused layers"
    )
    parser.add_argument("--batch-invariant", action="store_true", help="tokens and log-probs bitwise the same in any batch")
    parser.add_argument("--filter", nargs="+", default=[""], help='sampling parameters, such as top_p=0.9,top_k=50; "" for none')
    parser.add_argument(
        "--lora", type=int, nargs="+", default=[0], metavar="RANK",
        help="decode with adapters of these ranks beside every linear layer but the head; 0 for none",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--name", help="middle part of the result file's name, instead of the shape")
    return parser


def _model(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    if options.model:
        return AutoModelForCausalLM.from_pretrained(model_folder(options.model), dtype=dtype).to(device).eval()
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = model_config(options.shape, max_position_embeddings=32_768, rope_parameters=rope)
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        torch.nn.init.normal_(parameter, mean, 0.1 if parameter.dim() == 1 else 0.02)
    return model.eval()


def _load(name: str, options: argparse.Namespace) -> Load:
    sizes = {"num_prompts": options.prompts, "n": options.n} | ({"response": options.response} if name == "fixed" else {})
    return LOADS[name](**{size: value for size, value in sizes.items() if value})


def _maker(rollout: RolloutEngine) -> Make:
    return lambda filtered: lambda load: rollout.generate(_requests(load), _sampling(load, filtered))


def _lockstep(
    name: str, model: PreTrainedModel, options: argparse.Namespace, rank: int, adapters: dict[str, Tensor]
) -> RolloutEngine:
    """The engine over the model, with adapters of this rank, which it leaves in `adapters`."""
    config = RolloutConfig(
        name=name,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        gpu_memory_utilization=options.memory,
        batch_invariant=options.batch_invariant,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    if options.generic_layers:
        from lockstep.generation.gpu import backend

        backend.is_fusable = lambda config, mixtures: False
    attention = {"native": "lockstep_cached", "hf": "sdpa"}[name]
    module = share_structure(model, attention)
    if rank:
        adapters |= _adapt(module, rank)
    return make_rollout(module, config, pad_token_id=0)


def _adapt(module: PreTrainedModel, rank: int) -> dict[str, Tensor]:
    """Random adapters, as training would leave them, beside every linear layer but the head; returns them by the trainer's names."""
    head = module.get_output_embeddings()
    named = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear and layer is not head}
    add_adapters(module, {name: SimpleNamespace(r={"default": rank}, scaling={"default": 1.0}) for name in named})
    made = {}
    for name, part in module.named_modules():
        if isinstance(part, AdaptedLinear):
            like = {"dtype": part.weight.dtype, "device": part.weight.device}
            part.lora_A = nn.Parameter(torch.randn(rank, part.in_features, **like) / part.in_features**0.5, requires_grad=False)
            part.lora_B = nn.Parameter(0.01 * torch.randn(part.out_features, rank, **like), requires_grad=False)
            for half in ("lora_A", "lora_B"):
                made[f"{name}.{half}.default.weight"] = getattr(part, half).detach().clone()
    return made


def _requests(load: Load) -> list[Request]:
    numbers: dict[int, int] = {}
    requests = []
    for ids, length in zip(load.prompts, load.lengths, strict=True):
        sample = numbers[id(ids)] = numbers.get(id(ids), -1) + 1
        requests.append(Request(torch.tensor(ids), (0, len(numbers), sample), max_tokens=length))
    return requests


def _filter(text: str) -> dict[str, Any]:
    """top_p=0.9,top_k=50 as arguments of SamplingParams, which names what is wrong with them."""
    pairs = [part.split("=") for part in text.split(",") if part]
    return {name: int(value) if name == "top_k" else float(value) for name, value in pairs}


def _sampling(load: Load, filtered: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0} | filtered, max_tokens=max(load.lengths), stop_token_ids=(), seed=SEED)


def _vllm(model: PreTrainedModel, options: argparse.Namespace) -> RolloutEngine:
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    config = RolloutConfig(
        name="vllm",
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        gpu_memory_utilization=options.memory,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    return process_rollout(config.name)(ModelConfig(path=folder), config, 0, model.device, model.dtype)


def _measure(generate: Generate, load: Load, repeats: int) -> tuple[dict[str, Any], list[Completion]]:
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        completions = generate(load)
        seconds.append(time.perf_counter() - start)
    assert [len(c.ids) for c in completions] == load.lengths, "an engine ended a response before its length"
    row = {
        "requests": len(load.lengths),
        "tokens": load.num_tokens,
        "first_run_s": round(seconds[0], 3),
        "runs_s": [round(s, 3) for s in seconds[1:]],
        "tokens_per_s": round(load.num_tokens / min(seconds[1:] or seconds)),
    }
    return row, completions


def _trainer_check(
    model: PreTrainedModel, load: Load, completions: list[Completion], count: int, rank: int, adapters: dict[str, Tensor]
) -> dict[str, float]:
    """Sampler against the training engine (float32 weights, computation in the model's type) on some of the responses."""
    step = max(1, len(completions) // count)
    chosen = range(0, len(completions), step)
    data = DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([torch.tensor(load.prompts[i]) for i in chosen]),
            "responses": Ragged.from_rows([completions[i].ids for i in chosen]),
        }
    )
    dtype = str(model.dtype).removeprefix("torch.")
    with model.device:
        module = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32, attn_implementation=PACKED)
    module.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    install_fast_layers(module)
    backend = "cpu:gloo,cuda:nccl" if model.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    config, lora = ModelConfig(lora_rank=rank, lora_alpha=max(1, rank)), None
    if rank:
        lora = Lora(module, config, Head.LANGUAGE_MODEL, SEED)
        lora.values = {name: tensor.float() for name, tensor in adapters.items()}
    spec = EngineSpec(model=config, head=Head.LANGUAGE_MODEL, optim=None, total_updates=0, device=model.device, seed=0)
    engine = FSDPEngine(module, spec, version=2, config=FSDPConfig(dtype=dtype), lora=lora)
    trained = engine.forward(data, Budget(8192)).ragged("log_probs").values
    dist.destroy_process_group()
    difference = (trained - torch.cat([completions[i].log_probs for i in chosen])).abs()
    ratio = torch.exp(trained - torch.cat([completions[i].log_probs for i in chosen]))
    return {
        "tokens": len(difference),
        "mean": round(float(difference.mean()), 5),
        "max": round(float(difference.max()), 4),
        "mean_ratio": round(float(ratio.mean()), 5),
    }


def _line(row: dict[str, Any] | None) -> str:
    if row is None:
        names = f"{'engine':8}{'load':12}{'requests':>9}{'tokens':>9}{'first run s':>13}{'best run s':>12}{'tokens/s':>10}"
        return names + "  |sampler - trainer|, filter"
    check = row.get("trainer_log_prob_difference", {})
    told = f"mean {check['mean']:.4f}, max {check['max']:.3f}" if check else "-"
    return (
        f"{row['engine']:8}{row['load']:12}{row['requests']:9}{row['tokens']:9}{row['first_run_s']:13.2f}"
        f"{min(row['runs_s'], default=row['first_run_s']):12.3f}{row['tokens_per_s']:10}  {told}  {row['filter']}"
        + (f"rank {row['lora']}" if row["lora"] else "")
    )


def _about(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": date.today().isoformat(),
        "hardware": torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{platform.processor()} x {torch.get_num_threads()}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()},
        "commit": commit or "unknown",
        "dtype": str(dtype),
        "arguments": {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items() if name != "out"
        },
    }


if __name__ == "__main__":
    main()
