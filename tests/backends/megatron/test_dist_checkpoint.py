"""What Megatron's dist_checkpointing writes, on two tensor-parallel ranks, is read as a Hugging Face model without Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cuda_to_cpu
from helpers.distributed import run_distributed
from transformers import AutoModelForCausalLM, Qwen2Config

from lockstep.models.source import model_folder

pytest.importorskip("megatron.core")
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

IDS = torch.arange(18).view(2, 9) % 17
OFF = dict.fromkeys(
    ("add_bias_linear", "bias_activation_fusion", "gradient_accumulation_fusion", "masked_softmax_fusion", "bias_dropout_fusion",
     "apply_rope_fusion", "perform_initialization"), False
)  # fmt: skip


def write(folder: Path, metadata: dict[str, Any] | None) -> torch.Tensor:
    cuda_to_cpu.install()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", layernorm_epsilon=1e-6, add_qkv_bias=True,
        use_cpu_initialization=True, hidden_dropout=0, attention_dropout=0, tensor_model_parallel_size=2, **OFF,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=40, max_sequence_length=64, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, parallel_output=False,
    )  # fmt: skip
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        divided = ("linear_" in name and "layer_norm" not in name) or "embedding" in name or "output_layer" in name
        torch.manual_seed(len(name) + (torch.distributed.get_rank() if divided else 0))
        torch.nn.init.normal_(parameter, std=0.3)
    model.eval()
    group = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = model.sharded_state_dict(metadata=metadata | group) if metadata else model.sharded_state_dict()
    dist_checkpointing.save({"model": state}, str(folder))
    mask = torch.ones(1, 1, 9, 9).tril().logical_not()
    with torch.no_grad():
        return model(IDS, torch.arange(9)[None].expand(2, -1), mask)


@pytest.mark.parametrize("metadata", [None, {"singleton_local_shards": True}])
def test_the_model_that_megatron_saved_gives_the_same_logits(metadata, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = tmp_path / "global_step_1" / "actor" / "model" / "dist_ckpt"
    files.mkdir(parents=True)
    logits, _ = run_distributed(write, 2, files, metadata)
    Qwen2Config(
        vocab_size=38, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False, rope_theta=10000.0, rms_norm_eps=1e-6,
    ).save_pretrained(files.parent / "huggingface")  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(model_folder(str(tmp_path / "global_step_1")), dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, logits[..., :38], rtol=1e-4, atol=1e-4)
