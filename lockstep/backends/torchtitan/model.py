"""The model: torchtitan's dense decoder with the numbers of a Hugging Face one, made for packed rows.

Three parts are our own: attention (rows end to end, from a PackedLayout), the rotary embedding (computed once for all layers, with Hugging
Face's frequencies and in its precision, since what samples is a Hugging Face module), and the output layer, which answers a question about
some tokens instead of giving logits of all. Legend: N tokens, M asked for, H hidden size.
"""

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.models.common import Embedding, FeedForward, GQAttention, Linear, QKVLinear, RMSNorm
from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_param_placement
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig
from transformers import PreTrainedModel

from lockstep.models.attention import packed_attention
from lockstep.models.chunked_head import Read, VocabularyPart
from lockstep.workers.engine.dtensor import local_part


@dataclass(frozen=True)
class Question:
    """What is wanted of a forward pass."""

    at: Tensor
    """[M]: the places in the pack whose outputs are wanted."""
    read: Read
    """What a language model's output layer answers: anything made of tensors, of the hidden states [M, H] there and its own weights."""


class TitanAttention(Module):
    """Attention inside the segments of a pack; flash attention on a GPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        sliding_window: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.sliding_window = config.sliding_window

    # torchtitan finds the placements of the arguments by these names.
    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, scale: float | None = None, **kwargs: Any
    ) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        return packed_attention(
            self, query, key, value, None, layout=attention_masks, scaling=scale, sliding_window=self.sliding_window
        )[0]


class Rotation(Module):
    """The rotary embedding of queries and keys [1, N, heads, head size]; `positions` are (cosines, sines), each [1, N, 1, head size]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = (_replicated(x, query) for x in positions)
        return _rotate(query, cos, sin), _rotate(key, cos, sin)


class LanguageHead(Linear):
    """Answers with what a question reads."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: Tensor, question: Question | None = None) -> Any:
        assert question is not None
        if isinstance(self.weight, DTensor):  # each rank has a part of the vocabulary, and makes a part of the gradient
            assert isinstance(input, DTensor)
            hidden = input.to_local(grad_placements=[Partial()])[0, question.at]
            return question.read(hidden, self.weight.to_local(), None, VocabularyPart.of(self.weight))
        return question.read(input[0, question.at], self.weight, None, None)


class ValueHead(Linear):
    """Answers with one number [M] for each place of a question, in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: Tensor, question: Question | None = None) -> Tensor:
        assert question is not None
        hidden = local_part(input)[0, question.at].float()
        bias = None if self.bias is None else local_part(self.bias).float()
        # A sum over one number: FSDP2 warns about outputs that are views.
        return F.linear(hidden, local_part(self.weight).float(), bias).sum(-1)


class PackedDecoder(Qwen3Model):
    """A decoder, or one stage of it: `tokens` are then the hidden states of the stage before, and the answer those for the next."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        inv_freq: tuple[float, ...]
        """The frequencies of the rotary embedding, [head size / 2]."""
        rotary_scale: float
        """Multiplies cosines and sines."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rotary_scale = config.rotary_scale
        # Not on the meta device, even where the rest is: it is in no file.
        self.register_buffer("inv_freq", torch.tensor(config.inv_freq, device="cpu"), persistent=False)

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)
        if self.enable_weight_tying:  # embedding and output layer were divided apart
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, attention_masks: Any = None, question: Question | None = None
    ) -> Tensor:
        hidden = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        assert positions is not None
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        rotary = tuple((f() * self.rotary_scale).to(hidden.dtype) for f in (angles.cos, angles.sin))
        for layer in self.layers.values():
            hidden = layer(hidden, attention_masks, rotary)
        return hidden if self.lm_head is None else self.lm_head(self.norm(hidden), question)


def decoder_config(model: PreTrainedModel, tied: bool) -> PackedDecoder.Config:
    """The torchtitan config of a Hugging Face model (llama, qwen2, qwen3; its weights may be on the meta device).

    `tied`: its output layer is its embedding.
    """
    hf = model.config
    body: Any = model.get_submodule("model")
    score = getattr(model, "score", None)
    config = PackedDecoder.Config(
        vocab_size=hf.vocab_size,
        dim=hf.hidden_size,
        norm=_norm(hf.hidden_size, hf.rms_norm_eps),
        tok_embeddings=Embedding.Config(num_embeddings=hf.vocab_size, embedding_dim=hf.hidden_size),
        lm_head=LanguageHead.Config(in_features=hf.hidden_size, out_features=hf.vocab_size)
        if score is None
        else ValueHead.Config(in_features=hf.hidden_size, out_features=1, bias=score.bias is not None),
        layers=[_layer(hf, layer) for layer in body.layers],
        enable_weight_tying=tied,
        inv_freq=tuple(body.rotary_emb.inv_freq.tolist()),
        rotary_scale=body.rotary_emb.attention_scaling,
    )
    set_qwen3_sharding_config(config, enable_sp=True, enable_ep=False)
    if score is not None:
        # A single row cannot be divided: every rank of a tensor-parallel group has it.
        whole = dense_param_placement(tp=spmd.R)
        hidden = {"input": dense_activation_placement(tp=spmd.R)}
        config.lm_head.sharding_config = ShardingConfig(
            state_shardings={"weight": whole, "bias": whole}, in_src_shardings=hidden, in_dst_shardings=hidden
        )
    return config


def _layer(hf: Any, layer: Any) -> Qwen3TransformerBlock.Config:
    """The config of one layer; what the families differ in is read off the Hugging Face layer."""
    attention = layer.self_attn
    mlp = layer.mlp
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(hf.hidden_size, hf.rms_norm_eps),
        ffn_norm=_norm(hf.hidden_size, hf.rms_norm_eps),
        attention=GQAttention.Config(
            n_heads=hf.num_attention_heads,
            n_kv_heads=hf.num_key_value_heads,
            head_dim=attention.head_dim,
            dim=hf.hidden_size,
            qkv_linear=QKVLinear.Config(head_dim=attention.head_dim, wq=_linear(attention.q_proj), wkv=_linear(attention.k_proj)),
            wo=_linear(attention.o_proj),
            qk_norm=_norm(attention.head_dim, hf.rms_norm_eps) if hasattr(attention, "q_norm") else None,
            inner_attention=TitanAttention.Config(sliding_window=getattr(attention, "sliding_window", None)),
            rope=Rotation.Config(),
        ),
        feed_forward=FeedForward.Config(w1=_linear(mlp.gate_proj), w2=_linear(mlp.down_proj), w3=_linear(mlp.up_proj)),
    )


def _linear(layer: torch.nn.Linear) -> Linear.Config:
    return Linear.Config(in_features=layer.in_features, out_features=layer.out_features, bias=layer.bias is not None)


def _norm(size: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _replicated(x: Tensor, like: Tensor) -> Tensor:
    """The same tensor on every rank of the mesh of `like`, where that is a DTensor."""
    if not isinstance(like, DTensor):
        return x
    return DTensor.from_local(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
