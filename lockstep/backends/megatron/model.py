"""One stage of the model on one rank: embedding, layers, head, as far as the stage has them."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.backends.megatron.convert import padded_vocabulary
from lockstep.backends.megatron.layout import MegatronLayout
from lockstep.backends.megatron.library import (
    MegatronModule,
    ModelType,
    TransformerBlock,
    TransformerConfig,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from lockstep.backends.megatron.spec import PackedRowsParams, block_spec
from lockstep.models.chunked_head import Read, VocabularyPart
from lockstep.models.load import Head
from lockstep.models.packing import PackedRows


class Stage(MegatronModule):
    """What megatron's schedule calls for each micro-batch.

    The last stage gives what `read` makes of a language model's hidden states, or [M, 1] value or score. Others give the hidden states
    that the next one gets.
    """

    def __init__(
        self,
        config: TransformerConfig,
        head: Head,
        layout: MegatronLayout,
        *,
        vocabulary: int,
        tied: bool,
        head_bias: bool,
        inverse_frequencies: Tensor,
        windows: tuple[int | None, ...],
    ) -> None:
        super().__init__(config=config)
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = layout.is_first_stage
        self.post_process = layout.is_last_stage
        self.share_embeddings_and_output_weights = tied
        self._tokens_multiple = layout.tensor.size() if config.sequence_parallel else 1
        self.register_buffer("inverse_frequencies", inverse_frequencies.float(), persistent=False)
        rows = padded_vocabulary(vocabulary, layout.tensor.size())
        self.embedding: VocabParallelEmbedding | None = None
        if self.pre_process:
            self.embedding = VocabParallelEmbedding(
                rows,
                config.hidden_size,
                init_method=config.init_method,
                reduce_scatter_embeddings=config.sequence_parallel,
                config=config,
                tp_group=layout.tensor,
            )
        self.decoder = TransformerBlock(
            config, block_spec(config, windows), pre_process=self.pre_process, post_process=self.post_process
        )
        self.head: VocabularyHead | NumberHead | None = None
        if self.post_process and head is Head.LANGUAGE_MODEL:
            shares = tied and self.embedding is not None
            self.head = VocabularyHead(config, layout.tensor, vocabulary, has_weight=not shares)
        elif self.post_process:
            self.head = NumberHead(config, head_bias)
        if tied and layout.pipeline.size() > 1 and (self.pre_process or self.post_process):
            weight = self.shared_embedding_or_output_weight()
            weight.shared_embedding = True  # type: ignore[attr-defined]
            weight.shared = not self.pre_process  # type: ignore[attr-defined]  # counted once in the gradient's norm

    def shared_embedding_or_output_weight(self) -> Tensor:
        """The weight of this stage that is tied to another stage's; megatron adds up their gradients."""
        layer = self.embedding if self.embedding is not None else self.head
        weight = layer.weight if layer is not None else None
        assert weight is not None, "a stage in the middle has no such weight"
        return weight

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """megatron's schedule gives the hidden states of the stage before."""
        self.decoder.set_input_tensor(input_tensor[0])

    def forward(self, packed: PackedRows, read: Read) -> Any:
        padding = -packed.input_ids.shape[1] % self._tokens_multiple
        hidden = None
        if self.embedding is not None:
            hidden = self.embedding(F.pad(packed.input_ids, (0, padding)))
            if not self.config.sequence_parallel:
                hidden = hidden.transpose(0, 1).contiguous()
        positions = F.pad(packed.position_ids[0], (0, padding)).float()
        angles = torch.outer(positions, self.inverse_frequencies)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], dim=-1)[:, None, None],
            packed_seq_params=PackedRowsParams(qkv_format="sbhd", layout=packed.layout),
        )
        if self.head is None:
            return hidden
        if isinstance(self.head, NumberHead):
            return self.head(hidden, packed)
        tied = self.embedding.weight if self.share_embeddings_and_output_weights and self.embedding is not None else None
        return self.head(hidden, packed, read, tied)


class VocabularyHead(nn.Module):
    """The rows of the output layer that this rank has."""

    def __init__(self, config: TransformerConfig, group: dist.ProcessGroup, vocabulary: int, *, has_weight: bool) -> None:
        super().__init__()
        rows = padded_vocabulary(vocabulary, group.size()) // group.size()
        start = group.rank() * rows
        size = max(0, min(vocabulary - start, rows))
        self._part = VocabularyPart(group, start, size, most=rows) if group.size() > 1 else None
        self._sequence_parallel = config.sequence_parallel
        self.weight: nn.Parameter | None = None
        if has_weight:
            self.weight = nn.Parameter(torch.empty(rows, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, packed: PackedRows, read: Read, tied: Tensor | None) -> Any:
        """What `read` makes of the hidden states where tokens are predicted."""
        if self._sequence_parallel:  # backward: the parts' gradients are summed and divided into the ranks' tokens
            chosen = gather_from_sequence_parallel_region(hidden)[packed.predict_at, 0]
        else:
            chosen = copy_to_tensor_model_parallel_region(hidden[packed.predict_at, 0])  # backward: summed
        weight = self.weight if tied is None else tied
        assert weight is not None
        return read(chosen, weight, None, self._part)


class NumberHead(nn.Linear):
    """One number per token, whole on every rank, computed in float32 from weights in the type of the model."""

    def __init__(self, config: TransformerConfig, bias: bool) -> None:
        super().__init__(config.hidden_size, 1, bias=bias, dtype=config.params_dtype)
        self._sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor, packed: PackedRows) -> Tensor:  # type: ignore[override]
        """[M, 1]"""
        if self._sequence_parallel:  # each rank computes the whole loss, so the gradient is divided and not summed
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden[packed.predict_at, 0].float(), self.weight.float(), bias)
