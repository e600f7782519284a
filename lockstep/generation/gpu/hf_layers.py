"""HFDecoder: any family, through the Hugging Face module itself with our attention function; its layers compiled once for decoding.

The layer function is compiled with the layer as an argument: one graph serves all layers of a kind, because nothing in it depends on which
layer it is. That is why the pages travel as keyword arguments and `layer_idx` is never read.
"""

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from lockstep.errors import ConfigError
from lockstep.generation.gpu.attention import SharedPrefixes, paged_attention, store_kv
from lockstep.generation.gpu.prefill import PromptRows, packed_prompt_attention
from lockstep.generation.pages import KVCache
from lockstep.models.attention import Variant

GPU_PAGED = "lockstep_gpu_paged"


@torch.library.custom_op("lockstep::paged_decode", mutates_args=())
def _paged_decode(
    query: Tensor, key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, page_table: Tensor, context_lens: Tensor,
    scale: float, window: int, softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    # The pages are written here and not declared so: nothing else in a compiled layer reads them, and a declared change would make
    # the compiler reason about copies of the whole pool.
    store_kv(key, value, k_pages, v_pages, slots)
    return paged_attention(
        query, k_pages, v_pages, page_table, context_lens, scale=scale, window=window or None, softcap=softcap or None, sinks=sinks
    )


@_paged_decode.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    return query.new_empty(query.shape)


def gpu_paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    page_table: Tensor | None = None,
    context_lens: Tensor | None = None,
    packed: PromptRows | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over our pages: `packed` prompts, or one new token for each row of `page_table`.

    query [1, H, N, D]; key, value [1, kv_heads, N, D]; returns ([1, N, H, D], None).
    """
    q, k, v = (_heads_together(x[0].transpose(0, 1)) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if packed is not None:
        store_kv(k, v, k_pages, v_pages, slots)
        variant = Variant(scale, sliding_window, softcap, s_aux)
        return packed_prompt_attention(q, k, v, k_pages, v_pages, packed, variant)[None], None
    out = torch.ops.lockstep.paged_decode(
        q, k, v, k_pages, v_pages, slots, page_table, context_lens, scale, sliding_window or 0, softcap or 0.0, s_aux
    )
    return out[None], None


def _heads_together(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


AttentionInterface.register(GPU_PAGED, gpu_paged_attention)


class HFDecoder:
    """Logits of packed tokens, with keys and values written to the pages. Until `release`, the module is this decoder's."""

    def __init__(self, module: PreTrainedModel, cache: KVCache, compile_layers: bool) -> None:
        self._module = module
        self._attention = module.config._attn_implementation
        self._layers = layers_of(module)
        self.num_heads: int = module.config.get_text_config().num_attention_heads
        module.set_attn_implementation(GPU_PAGED)
        self._compiled = torch.compile(_call_layer) if compile_layers else _call_layer
        for layer, number in self._layers:
            layer.forward = functools.partial(self._layer, layer, *cache.layer(number))

    def release(self) -> None:
        """Give the module back as it was."""
        for layer, _ in self._layers:
            layer.__dict__.pop("forward", None)
        self._module.set_attn_implementation(self._attention)

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        page_table: Tensor,
        context_lens: Tensor,
        shared: SharedPrefixes | None,
        long: bool = False,
    ) -> Tensor:
        """[rows, vocabulary] float32 after one new token for each row. `shared` and `long` are not used: each row reads all of its pages,
        in as many parts as the number of rows says."""
        for tensor, dimensions in ((slots, [0]), (page_table, [0, 1]), (context_lens, [0])):
            torch._dynamo.maybe_mark_dynamic(tensor, dimensions)
        return self._logits(tokens, positions, slots=slots, page_table=page_table, context_lens=context_lens)

    def prefill(self, tokens: Tensor, positions: Tensor, slots: Tensor, rows: PromptRows) -> Tensor:
        """[rows, vocabulary] float32 after whole sequences that lie end to end."""
        return self._logits(tokens, positions, slots=slots, packed=rows, logits_to_keep=rows.wanted)

    def _logits(self, tokens: Tensor, positions: Tensor, **kwargs: Any) -> Tensor:
        out = self._module(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **kwargs)
        return out.logits[0].float()

    def _layer(self, layer: nn.Module, k_pages: Tensor, v_pages: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "packed" in kwargs:
            return _call_layer(layer, k_pages, v_pages, args, kwargs)
        for pages in (k_pages, v_pages):
            torch._dynamo.maybe_mark_dynamic(pages, 0)
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.shape[0] == 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, 1)
        return self._compiled(layer, k_pages, v_pages, args, kwargs)


def _call_layer(layer: nn.Module, k_pages: Tensor, v_pages: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(layer).forward(layer, *args, k_pages=k_pages, v_pages=v_pages, **kwargs)


def layers_of(module: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """The decoder layers with their numbers. Raises ConfigError for a module whose layers cannot be found so."""
    names = set(module._no_split_modules or ())
    found = []
    for layer in module.modules():
        if type(layer).__name__ in names:
            numbers = {part.layer_idx for part in layer.modules() if isinstance(getattr(part, "layer_idx", None), int)}
            if len(numbers) == 1:
                found.append((layer, cast(int, numbers.pop())))
    if sorted(number for _, number in found) != list(range(len(found))) or not found:
        raise ConfigError(
            f"the layers of {type(module).__name__} cannot be told apart for decoding on a GPU (found {[n for _, n in found]}); "
            "set actor_rollout_ref.rollout.name=hf"
        )
    return found
