"""The transformer that megatron-core is asked for: its config, and layers of plain torch modules that take packed rows."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.backends.megatron.library import (
    MegatronModule,
    ModuleSpec,
    PackedSeqParams,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    quiet,
)
from lockstep.config.engine import MegatronConfig
from lockstep.models.attention import PackedLayout, packed_attention
from lockstep.models.flops import head_size

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""lockstep.models.recompute's kinds in megatron's words."""


@dataclass
class PackedRowsParams(PackedSeqParams):
    """Carries the layout of packed rows through megatron's layers, also when a layer is computed again in the backward pass.

    The format is not "thd": positions may start anywhere (rows that continue a shared prompt), so the rotary angles come token by token.
    """

    layout: PackedLayout | None = None


def transformer_config(hf_config: Any, section: MegatronConfig, dtype: torch.dtype, recompute: str) -> TransformerConfig:
    """megatron's config of a model of FAMILIES. Every fused kernel that needs TransformerEngine or Apex is off."""
    with quiet():
        return TransformerConfig(
            num_layers=hf_config.num_hidden_layers,
            hidden_size=hf_config.hidden_size,
            ffn_hidden_size=hf_config.intermediate_size,
            num_attention_heads=hf_config.num_attention_heads,
            num_query_groups=hf_config.num_key_value_heads,
            kv_channels=head_size(hf_config),
            normalization="RMSNorm",
            layernorm_epsilon=hf_config.rms_norm_eps,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=hf_config.model_type == "qwen2",
            qk_layernorm=hf_config.model_type == "qwen3",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=section.tensor_model_parallel_size,
            pipeline_model_parallel_size=section.pipeline_model_parallel_size,
            sequence_parallel=section.sequence_parallel,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",  # the default is refused with variable lengths, even without experts
            batch_p2p_comm=True,
            deallocate_pipeline_outputs=True,
            use_cpu_initialization=True,
            perform_initialization=False,
            transformer_impl="local",
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            **RECOMPUTE[recompute],
        )


def block_spec(config: TransformerConfig, windows: tuple[int | None, ...]) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage. `windows` are the sliding windows of all layers of the model; None sees all."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=MegatronAttention, params={"windows": windows})
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    count = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)


class RMSNorm(nn.RMSNorm):
    """torch's, which also goes with sequence parallelism: each rank then sees a part of the tokens, and megatron adds up the gradients."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **options: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class MegatronAttention(MegatronModule):
    """Attention of the heads of one rank over packed rows. Tokens after those of the layout are padding and give zeros."""

    def __init__(self, config: TransformerConfig, layer_number: int, windows: tuple[int | None, ...], **options: Any) -> None:
        super().__init__(config=config)
        self._window = windows[layer_number - 1]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedRowsParams,
        **options: Any,
    ) -> Tensor:
        """[N, 1, H * D] from query [N, 1, H, D], key and value [N, 1, K, D]."""
        layout = packed_seq_params.layout
        assert layout is not None
        tokens = layout.num_tokens
        q, k, v = (x[:tokens].permute(1, 2, 0, 3) for x in (query, key, value))
        out, _ = packed_attention(self, q, k, v, None, layout=layout, sliding_window=self._window)  # [1, N, H, D]
        out = out.reshape(tokens, 1, -1)
        padding = len(query) - tokens
        return F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out
