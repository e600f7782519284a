"""Families whose models could train or generate other numbers than they are: each is exact, or refused at load by its class."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.rollouts import make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError
from lockstep.models.attention import PackedLayout
from lockstep.models.chunked_head import hand_out_hidden
from lockstep.models.flops import model_cost
from lockstep.models.load import Head, load_model
from lockstep.models.recompute import apply_recompute

_ALL = 0.3  # so large that no draw leaves every number alone
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DROPOUT: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": _ALL, "attention_dropout": _ALL, "layerdrop": 0.5},
    "seed_oss": {"head_dim": 8, "residual_dropout": _ALL, "attention_dropout": _ALL},
    "biogpt": {
        "hidden_dropout_prob": _ALL,
        "attention_probs_dropout_prob": _ALL,
        "activation_dropout": _ALL,
        "layerdrop": 0.5,
    },
    "phimoe": {**_EXPERTS, "router_jitter_noise": 0.2, "input_jitter_noise": 0.2, "hidden_dropout": _ALL},
    "starcoder2": {"residual_dropout": _ALL, "embedding_dropout": _ALL, "attention_dropout": _ALL},
    "mixtral": {**_EXPERTS, "router_jitter_noise": 0.2},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "resid_pdrop": _ALL, "embd_pdrop": _ALL},
}
_ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
LIMITED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "phi3": (
        "original_max_position_embeddings",
        16,
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                **_ROPE,
                "rope_type": "longrope",
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [4.0, 5.0, 6.0, 7.0],
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama": (
        "max_position_embeddings",
        16,
        {"max_position_embeddings": 16, "rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 4.0}},
    ),
    "phimoe": ("sliding_window", 16, {**_EXPERTS, "sliding_window": 16}),
    "llama4_text": (
        "attention_chunk_size",
        16,
        {
            "head_dim": 8,
            "attention_chunk_size": 16,
            "floor_scale": 20,
            "attn_scale": 2.0,
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}
"""For each family the key of config.json that limits a row, the limit, and the config."""


def loaded(path: str) -> PreTrainedModel:
    return load_model(ModelConfig(path=path), Head.LANGUAGE_MODEL, seed=0)


def own_model(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def rows_of(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 32, (length,), generator=generator) for length in lengths]


def log_probs(logits: Tensor, row: Tensor) -> Tensor:
    return logits[:-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]


def packed_log_probs(model: PreTrainedModel, rows: list[Tensor]) -> Tensor:
    lengths = torch.tensor([len(row) for row in rows])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    layout = PackedLayout(lengths)
    out = model(input_ids=torch.cat(rows)[None], position_ids=positions[None], use_cache=False, layout=layout).logits[0]
    return torch.cat([log_probs(part, row) for part, row in zip(out.split(lengths.tolist()), rows, strict=True)])


def alone_log_probs(model: PreTrainedModel, rows: list[Tensor]) -> Tensor:
    return torch.cat([log_probs(model(input_ids=row[None], use_cache=False).logits[0], row) for row in rows])


def assert_trains_exactly(path: str, rows: list[Tensor], recompute: str) -> None:
    """Log-probs of packed rows in a training pass, and their gradient, are those of each row alone in evaluation mode."""
    model, own = loaded(path), own_model(path)
    apply_recompute(model, recompute)
    mine, theirs = packed_log_probs(model, rows), alone_log_probs(own, rows)
    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)
    weights = torch.linspace(-1, 1, len(mine))
    (mine * weights).sum().backward()
    (theirs * weights).sum().backward()
    wanted = dict(own.named_parameters())
    for name, parameter in model.named_parameters():
        if wanted[name].grad is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        scale = wanted[name].grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, wanted[name].grad, atol=1e-4 * max(scale, 1e-2), rtol=1e-4, msg=name)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model_type", DROPOUT)
def test_what_is_random_in_training_mode_is_off(tmp_path: Path, model_type: str, recompute: str) -> None:
    path = save_tiny_model(tmp_path, model_type, **DROPOUT[model_type])
    assert_trains_exactly(path, rows_of(9, 5, 12), recompute)


@pytest.mark.parametrize("model_type", LIMITED)
def test_rows_within_the_limit_are_exact_beside_any_others(tmp_path: Path, model_type: str) -> None:
    """The pack is longer than the limit; the rows are not."""
    _, limit, changes = LIMITED[model_type]
    assert_trains_exactly(save_tiny_model(tmp_path, model_type, **changes), rows_of(limit - 1, 5, limit, 9), "none")


@pytest.mark.parametrize("model_type", LIMITED)
def test_a_longer_row_is_refused_by_the_key_that_limits_it(tmp_path: Path, model_type: str) -> None:
    key, limit, changes = LIMITED[model_type]
    model = loaded(save_tiny_model(tmp_path, model_type, **changes))
    with pytest.raises(ConfigError, match=f"{limit + 1} tokens.*{key}"):
        packed_log_probs(model, rows_of(3, limit + 1))


@pytest.mark.parametrize("model_type", LIMITED)
def test_the_native_engine_generates_exactly_up_to_the_limit(tmp_path: Path, model_type: str) -> None:
    """The passes are longer than the limit, and a row ends at it."""
    _, limit, changes = LIMITED[model_type]
    path = save_tiny_model(tmp_path, model_type, **changes)
    engine, own = make_rollout(path), own_model(path)
    engine.check()
    requests = make_requests(9)
    completions = engine.generate(requests, sampling(max_tokens=2 * limit, stop_token_ids=()))
    for request, completion in zip(requests, completions, strict=True):
        row = torch.cat([request.prompt_ids, completion.ids])
        assert len(row) == limit
        wanted = alone_log_probs(own, [row])[-len(completion.ids) :]
        torch.testing.assert_close(completion.log_probs, wanted, atol=2e-5, rtol=1e-5)


def test_llama_4_hands_out_hidden_states(tmp_path: Path) -> None:
    model = loaded(save_tiny_model(tmp_path, "llama4_text", **LIMITED["llama4_text"][2]))
    assert hand_out_hidden(model)
    (row,) = rows_of(6)
    inputs = {"input_ids": row[None], "position_ids": torch.arange(6)[None], "use_cache": False}
    inputs["layout"] = PackedLayout(torch.tensor([6]))
    hidden = model(**inputs, read=lambda hidden, *layer: hidden @ layer[0].T, read_at=torch.arange(6))
    torch.testing.assert_close(hidden, model(**inputs).logits[0])


REFUSED: dict[str, dict[str, Any]] = {
    # More keys than tokens.
    "deepseek_v4": {
        "head_dim": 16,
        "q_lora_rank": 8,
        "o_lora_rank": 8,
        "o_groups": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "layer_types": ["sliding_attention", "compressed_sparse_attention"],
    },
    # A mask of its own.
    "minimax_m3_vl_text": {
        "head_dim": 8,
        "rotary_dim": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_with_attention_of_another_kind_is_refused_by_its_class(tmp_path: Path, model_type: str) -> None:
    path = save_tiny_model(tmp_path, model_type, **REFUSED[model_type])
    with pytest.raises(ConfigError, match=r"ForCausalLM \(.*cannot compute packed rows"):
        loaded(path)


UNUSUAL: dict[str, dict[str, Any]] = {
    # Heads of other sizes in some layers.
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 32,
    },
    # These call view on the output of attention.
    "jetmoe": {"kv_channels": 8, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "afmoe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1},
}


@pytest.mark.parametrize("model_type", UNUSUAL)
def test_unusual_layers_train_exactly(tmp_path: Path, model_type: str) -> None:
    path = save_tiny_model(tmp_path, model_type, **UNUSUAL[model_type])
    assert model_cost(loaded(path)).widths > 0
    assert_trains_exactly(path, rows_of(12, 5, 20), "none")
