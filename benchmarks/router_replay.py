"""How far a sampler's log-probs are from a trainer's on a mixture of experts, with and without the sampler's routing.

    python -m benchmarks.router_replay
    python -m benchmarks.router_replay --upcycled smollm2-135m --rows test.jsonl --experts 8 --top-k 2 --prompts 8 --tokens 64

The sampler computes in bfloat16, the trainer in float32, from the same weights, in one process on a CPU. Without a model the mixture is a
random OLMoE. --upcycled makes a Mixtral of a Llama-like model: each expert is its MLP with noise, each router random; its prompts are
questions from --rows, a JSON-lines file with a field `question`. Prints, and writes to benchmarks/results/, the gap of
log-probs (mean and maximum), the share of choices that the trainer would have made otherwise, and the effective share of the samples.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.step import RESULTS, _about
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import EngineChoice, ModelConfig, OptimConfig
from lockstep.config.sampling import SamplingParams
from lockstep.generation.routing import RoutedRollout
from lockstep.models.chunked_head import LossOutput
from lockstep.models.load import Head, load_model, share_structure
from lockstep.models.packing import Budget
from lockstep.observability.metrics import values
from lockstep.protocol import DataProto, Ragged
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.engine.base import TokenOutputs, TokenRows
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.rollout.base import response_columns
from lockstep.workers.rollout.request import Request


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        prompts = _upcycle(options, folder) if options.upcycled else _random_mixture(options, folder)
        dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/meet")
        result = {"mixture": _mixture(options), "tokens": 0} | _measure(options, folder, prompts)
        dist.destroy_process_group()
    options.rows = options.rows and options.rows.name
    name = options.name or (f"upcycled_{options.upcycled}" if options.upcycled else "random")
    (RESULTS / f"router_replay_{name}.json").write_text(json.dumps(_about(options) | result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upcycled", help="a Llama-like model whose MLPs become experts")
    parser.add_argument("--rows", type=Path, help="JSON lines with `question`, for --upcycled")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--noise", type=float, default=0.1, help="of the upcycled experts, as a share of the weights' own size")
    parser.add_argument("--layers", type=int, default=4, help="of the random mixture")
    parser.add_argument("--hidden", type=int, default=128, help="likewise")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--n", type=int, default=4, help="samples per prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of each response")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("--name", help="last part of the result file's name")
    return parser


def _mixture(options: argparse.Namespace) -> str:
    kind = f"{options.upcycled} upcycled" if options.upcycled else f"random OLMoE, {options.layers} layers of {options.hidden}"
    return f"{kind}, {options.top_k} of {options.experts} experts"


def _random_mixture(options: argparse.Namespace, folder: str) -> list[Tensor]:
    """Write a random OLMoE; random prompts."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        vocab_size=512, hidden_size=options.hidden, intermediate_size=options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=4, num_key_value_heads=4, num_experts=options.experts, num_experts_per_tok=options.top_k,
        max_position_embeddings=2048, initializer_range=0.1, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    OlmoeForCausalLM(config).save_pretrained(folder)
    return [torch.randint(2, 512, (32,)) for _ in range(options.prompts)]


def _upcycle(options: argparse.Namespace, folder: str) -> list[Tensor]:
    """Write the Mixtral that the model becomes; the questions' tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    dense = load_model(ModelConfig(path=options.upcycled), Head.LANGUAGE_MODEL, seed=0)
    own = dense.config
    config = MixtralConfig(
        vocab_size=own.vocab_size, hidden_size=own.hidden_size, intermediate_size=own.intermediate_size, rms_norm_eps=own.rms_norm_eps,
        num_hidden_layers=own.num_hidden_layers, num_attention_heads=own.num_attention_heads, hidden_act=own.hidden_act,
        num_key_value_heads=own.num_key_value_heads, max_position_embeddings=own.max_position_embeddings,
        rope_parameters=own.rope_parameters, tie_word_embeddings=own.tie_word_embeddings, num_local_experts=options.experts,
        num_experts_per_tok=options.top_k, eos_token_id=own.eos_token_id, bos_token_id=own.bos_token_id, pad_token_id=own.pad_token_id,
        sliding_window=None,
    )  # fmt: skip
    mixture = MixtralForCausalLM(config)
    missing = mixture.load_state_dict({n: w for n, w in dense.state_dict().items() if ".mlp." not in n}, strict=False).missing_keys
    assert all(".mlp." in name for name in missing), missing
    with torch.no_grad():
        for layer, source in zip(mixture.model.layers, dense.model.layers, strict=True):
            gate_up = torch.cat([source.mlp.gate_proj.weight, source.mlp.up_proj.weight])
            for target, weight in (
                (layer.mlp.experts.gate_up_proj, gate_up),
                (layer.mlp.experts.down_proj, source.mlp.down_proj.weight),
            ):
                target.copy_(weight + options.noise * weight.std() * torch.randn_like(target))
            layer.mlp.gate.weight.normal_(std=1 / math.sqrt(own.hidden_size))
    mixture.save_pretrained(folder)
    tokenizer = hf_tokenizer(options.upcycled)
    lines = options.rows.read_text().splitlines()[: options.prompts]
    return [torch.tensor(tokenizer.encode(json.loads(line)["question"])) for line in lines]


def _measure(options: argparse.Namespace, folder: str, prompts: list[Tensor]) -> dict[str, Any]:
    model = ModelConfig(path=folder)
    module = share_structure(load_model(model, Head.LANGUAGE_MODEL, 0), RoutedRollout.attention).to(torch.bfloat16)
    sampler = RoutedRollout(module, RolloutConfig(router_replay=True), 0)
    requests = [Request(prompt, (0, i, sample)) for i, prompt in enumerate(prompts) for sample in range(options.n)]
    columns = response_columns(sampler.generate(requests, _sampling(options)))
    data = DataProto.from_dict({"prompts": Ragged.from_rows([request.prompt_ids for request in requests])}).union(columns)
    choice = EngineChoice("fsdp2")
    choice.fsdp_config.dtype = "float32"
    spec = EngineSpec(
        model=model, head=Head.LANGUAGE_MODEL, optim=OptimConfig(), total_updates=1, device=torch.device("cpu"), seed=options.seed
    )
    engine = make_engine(choice, spec)
    with_experts, without = data.select(None, []), data.select([n for n in data.columns if n != "experts"], [])
    found = {
        name: _gap(engine.forward(rows, Budget(4096)), data)
        for name, rows in (("own routing", without), ("replayed", with_experts))
    }
    metrics = values(engine.forward_backward(with_experts, _nothing, Budget(4096)))
    return {"tokens": len(data.ragged("responses").values), "rerouted": round(metrics["moe/rerouted"], 5), **found}


def _sampling(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=options.tokens, stop_token_ids=(), seed=options.seed)


def _nothing(outputs: TokenOutputs, tokens: TokenRows) -> LossOutput:
    assert outputs.log_probs is not None
    return LossOutput(0.0 * outputs.log_probs.sum(), {})


def _gap(computed: DataProto, data: DataProto) -> dict[str, float]:
    difference = (computed.ragged("log_probs").values - data.ragged("rollout_log_probs").values).double()
    ratio = difference.exp()
    return {
        "mean": round(difference.abs().mean().item(), 6),
        "p99": round(difference.abs().quantile(0.99).item(), 6),
        "max": round(difference.abs().max().item(), 6),
        "ess": round((ratio.mean() ** 2 / ratio.square().mean()).item(), 6),
    }


if __name__ == "__main__":
    main()
