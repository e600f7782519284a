"""Engine: the native engine on a model of its own, without a trainer. Texts or token ids in, ids, log-probs and texts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.generation.engine import NativeRollout
from lockstep.generation.model_support import check_small_cache
from lockstep.models.hf_config import stop_token_ids
from lockstep.models.load import Head, load_model, share_structure
from lockstep.models.lora import Lora
from lockstep.utils.device import resolve_device
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.rollout.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class GeneratedText:
    """The answer to one prompt, or why there is none."""

    prompt_ids: list[int]
    ids: list[int]
    """The response, with the stop token when there was one. Empty after an error."""
    log_probs: list[float]
    """Log-prob of each token of `ids` under the whole distribution at the sampling temperature (at 1 when greedy)."""
    text: str
    """`ids` as text, without special tokens."""
    finish_reason: str
    """"stop", "length" or "error"."""
    error: str | None = None
    """What was wrong; only with finish_reason "error"."""


class Engine:
    """Generates from a model that it loads. A context manager; `close` gives its memory back.

    `model` is a Hugging Face folder, a hub id, a .gguf file, or smollm2-135m; `adapter` a folder with a LoRA adapter to merge into it.
    `dtype` auto is bfloat16 on a GPU and float32 on a CPU. `max_num_seqs` sequences are decoded together. `gpu_memory_utilization` is the
    share of the free GPU memory that keys and values may take.

    Raises DataError for files that are not a whole model or tokenizer, ConfigError for a model that the engine would compute wrongly,
    ResourceError if there is no such device, MissingExtra for an adapter without peft.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_num_seqs: int = 256,
        gpu_memory_utilization: float = 0.8,
        kv_cache_dtype: str = "auto",
        batch_invariant: bool = False,
        adapter: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        config = RolloutConfig(
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
            batch_invariant=batch_invariant,
        )
        place = torch.device(resolve_device(device))
        self.tokenizer = hf_tokenizer(model, trust_remote_code)
        self.stop_token_ids = stop_token_ids(model, self.tokenizer)
        source = ModelConfig(path=model, trust_remote_code=trust_remote_code, lora_adapter_path=adapter)
        module = load_module(source, NativeRollout.attention).to(place, dtype_of(dtype, place))  # type: ignore[arg-type]
        if config.has_small_cache:
            check_small_cache(module, config)
        self.rollout = NativeRollout(module, config, self.tokenizer.pad_token_id, self._decode)
        self.rollout.check()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        min_p: float = 0.0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        seed: int = 0,
    ) -> list[GeneratedText]:
        """Return an answer for each prompt, in order. A prompt is a text or token ids.

        `stop_token_ids` None: the tokens that end a response of this model. The random numbers of an answer depend on `seed` and the number
        of its prompt alone. Raises ConfigError, naming the parameter, when one is out of range. A prompt that cannot be served has an
        answer with an error.
        """
        sampling = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            max_tokens=max_tokens,
            stop=tuple(stop),
            stop_token_ids=self.stop_token_ids if stop_token_ids is None else tuple(stop_token_ids),
            seed=seed,
        )
        rows = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        requests = [Request(torch.tensor(ids, dtype=torch.int64), (0, number, 0)) for number, ids in enumerate(rows)]
        answers = []
        for ids, completion in zip(rows, self.rollout.generate(requests, sampling), strict=True):
            response = completion.ids.tolist()
            answer = GeneratedText(
                prompt_ids=ids,
                ids=response,
                log_probs=completion.log_probs.tolist(),
                text=str(self.tokenizer.decode(response, skip_special_tokens=True)),
                finish_reason=completion.finish_reason,
                error=completion.error,
            )
            answers.append(answer)
        return answers

    def close(self) -> None:
        """Give the memory of keys and values back. The next `generate` takes it again."""
        self.rollout.sleep()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Return the type that a model computes in: `name`, or for auto bfloat16 on a GPU and float32 on a CPU."""
    if name != "auto":
        found: torch.dtype = getattr(torch, name)
        return found
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_module(config: ModelConfig, attention: str) -> PreTrainedModel:
    """Return the language model in float32 on the CPU, with `config`'s adapter merged into its weights.

    Raises DataError for files that are not a whole model, ConfigError for an adapter of another model, MissingExtra for an adapter without
    peft.
    """
    # Generation packs no rows: the engine has a check of its own (model_support.py), and transformers' own attention needs none.
    model = load_model(config, Head.LANGUAGE_MODEL, seed=0, packs=False)
    merged = share_structure(model, attention)
    if config.lora_adapter_path is not None:
        lora = Lora(model, config, Head.LANGUAGE_MODEL, seed=0)  # into `model` only; the other tree keeps its layers
        tensors = ((name, lora.values.get(name, parameter.detach())) for name, parameter in model.named_parameters())
        for name, tensor in lora.merged(tensors):
            merged.get_parameter(name).data.copy_(tensor)
    return merged
