"""What runs in vLLM's process: the engine, driven request by request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import WeightSyncError
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.rollout.base import Numbered, Request, Stopping
from lockstep.workers.rollout.counted import request_keys
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, received

Finished = tuple[int, list[int], list[float], str]
"""Number of the request, token ids, vLLM's log-probs of them, finish reason."""

_SEED_BITS = (1 << 63) - 1


class VLLMChild:
    """The target of an EngineProcess: its methods are generators. `cache_bytes` is None on a GPU."""

    def __init__(
        self, folder: str, model: ModelConfig, config: RolloutConfig, dtype: str, context: int | None, cache_bytes: int | None
    ) -> None:
        import vllm

        self._vllm, self._model, self._context = vllm, model, context
        self._device = torch.device("cpu" if cache_bytes is not None else "cuda")
        self._is_asleep = False
        self._tokenizer: Any = None
        memory: dict[str, Any] = {"kv_cache_memory_bytes": cache_bytes}
        if cache_bytes is None:
            free, total = torch.cuda.mem_get_info()
            memory = {"gpu_memory_utilization": config.gpu_memory_utilization * free / total, "enable_sleep_mode": True}
        self._llm = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            trust_remote_code=model.trust_remote_code,
            hf_overrides=model.override_config,
            dtype=dtype,
            seed=0,
            generation_config="vllm",  # not the folder's: what is sampled is what the run asks for
            logprobs_mode="raw_logprobs" if config.log_probs_are_raw else "processed_logprobs",
            enforce_eager=config.enforce_eager,
            enable_prefix_caching=True,
            max_model_len=context,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
            **memory,
        )
        # A model that vLLM accepts but cannot compute (a head size without a kernel) fails here, and not in the first step.
        probe = SamplingParams(temperature=1.0, max_tokens=2, stop_token_ids=(), seed=0)
        list(self.generate([(0, Request(torch.tensor([0]), (0, 0, 0)))], probe))

    def generate(self, requests: Sequence[Numbered], sampling: SamplingParams) -> Iterator[Finished | None]:
        """Each request as it finishes, None after each pass."""
        self._wake()
        engine = self._llm.llm_engine
        stopping: dict[str, Stopping] = {}
        seeds = request_keys(sampling.seed, [request.key for _, request in requests]).tolist()
        try:
            for (index, request), seed in zip(requests, seeds, strict=True):
                limits = Stopping.of(request, sampling, self._context, self._decode)
                stopping[str(index)] = limits
                prompt = {"prompt_token_ids": request.prompt_ids.tolist()}
                engine.add_request(str(index), prompt, self._params(limits, sampling, seed))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    finished = _finished(output, stopping[output.request_id])
                    if finished is not None:
                        del stopping[output.request_id]
                        if not output.finished:
                            engine.abort_request([output.request_id])
                        yield finished
                yield None
        finally:
            if stopping:
                engine.abort_request(list(stopping))

    def load(self, offer: WeightOffer) -> Iterator[Manifest]:
        """Replace the weights, and forget what was computed with the old ones; what was received."""
        self._wake()
        weights = received(offer, self._device)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("vLLM did not drop its prefix cache, which is of the old weights")
        yield weights.manifest

    def sleep(self) -> Iterator[None]:
        """Give the GPU memory back: the cache is dropped, the weights wait in host memory. vLLM has no sleep mode on a CPU."""
        if self._device.type == "cuda" and not self._is_asleep:
            self._llm.sleep(level=1)
            self._is_asleep = True
        yield None

    def _wake(self) -> None:
        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False

    def _params(self, limits: Stopping, sampling: SamplingParams, seed: int) -> Any:
        kinds = self._vllm.sampling_params.RequestOutputKind
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_k=max(sampling.top_k, 0),
            top_p=max(sampling.top_p, 1e-9),  # vLLM refuses 0, which keeps the likeliest token alone
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=limits.max_tokens,
            stop_token_ids=sorted(limits.token_ids),
            ignore_eos=True,  # the tokens that end a response are those of the request
            seed=seed & _SEED_BITS,
            logprobs=0,  # of the drawn token alone
            detokenize=False,
            output_kind=kinds.CUMULATIVE if limits.strings else kinds.FINAL_ONLY,
        )

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            self._tokenizer = hf_tokenizer(str(self._model.path), trust_remote_code=self._model.trust_remote_code)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _finished(output: Any, limits: Stopping) -> Finished | None:
    """The response, if it has ended by our own rules or by vLLM's."""
    (response,) = output.outputs
    ids = list(response.token_ids)
    end = limits.end(ids, len(ids) - 1) if ids else None
    if end is None and not output.finished:
        return None
    log_probs = [step[token].logprob for step, token in zip(response.logprobs, ids, strict=True)]
    return int(output.request_id), ids, log_probs, end[1] if end else "abort"
