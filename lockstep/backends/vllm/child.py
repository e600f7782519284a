"""What runs in vLLM's process: the engine, driven pass by pass."""

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.backends.process import IDLE
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import WeightSyncError
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.rollout.request import Request, Stopping, TopLogProbs
from lockstep.workers.rollout.sampling import request_key
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, received


@dataclass(slots=True)
class Piece:
    """What came of a request since the last one."""

    index: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """vLLM's."""
    tops: TopLogProbs = field(default_factory=list)
    reason: str | None = None
    """Why it has ended; None if it goes on."""
    prompt: list[float] | None = None
    """Log-probs of the prompt, where asked for; NaN at the first token."""
    prompt_tops: TopLogProbs = field(default_factory=list)


@dataclass(slots=True)
class _Live:
    """A request that vLLM has."""

    request: Request
    limits: Stopping
    ids: list[int] = field(default_factory=list)
    """The response so far, as far as vLLM has told."""


_SEED_BITS = (1 << 63) - 1


class VLLMChild:
    """The target of an EngineProcess: its methods are generators. `cache_bytes` is None on a GPU."""

    def __init__(
        self, folder: str, model: ModelConfig, config: RolloutConfig, dtype: str, context: int | None, cache_bytes: int | None
    ) -> None:
        import vllm

        self._vllm = vllm
        self._model = model
        self._context = context
        self._device = torch.device("cpu" if cache_bytes is not None else "cuda")
        self._is_asleep = False
        self._tokenizer: Any = None
        memory: dict[str, Any] = {"kv_cache_memory_bytes": cache_bytes}
        if cache_bytes is None:
            free, total = torch.cuda.mem_get_info()
            memory = {"gpu_memory_utilization": config.cache_share * free / total, "enable_sleep_mode": True}
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
            kv_cache_dtype=config.kv_cache_dtype,
            enable_prefix_caching=True,
            max_model_len=context,
            max_num_seqs=config.seats,
            max_num_batched_tokens=max(config.pass_tokens, config.seats),
            **memory,
        )
        # A model that vLLM accepts but cannot compute (a head size without a kernel) fails here, and not in the first step.
        probe = SamplingParams(temperature=1.0, max_tokens=2, stop_token_ids=(), seed=0)
        passes = self.generate(watches=False)
        next(passes)
        pieces = passes.send([("add", 0, Request(torch.tensor([0]), (0, 0, 0)), probe, 0)])
        while not (isinstance(pieces, list) and pieces[-1].reason):
            pieces = next(passes)

    def generate(self, watches: bool) -> Generator[list[Piece] | str | None, list[Any] | None, None]:
        """What came of the requests, pass by pass. Messages: ("add", index, request, parameters, tokens before the response) and ("abort",
        index). With `watches`, one that is aborted has the tokens that it had."""
        self._wake()
        engine = self._llm.llm_engine
        live: dict[str, _Live] = {}
        pieces: list[Piece] = []
        try:
            while True:
                messages = yield (pieces or None) if pieces or live else IDLE
                pieces = []
                for kind, index, *job in messages or ():
                    if kind == "add":
                        live[str(index)] = self._add(str(index), watches, *job)
                    elif live.pop(str(index), None) is not None:
                        engine.abort_request([str(index)])
                        pieces.append(Piece(index, reason="abort"))
                for output in engine.step() if live else ():
                    pieces += self._piece(output, live)
        finally:
            if live:
                engine.abort_request(list(live))

    def _add(self, name: str, watches: bool, request: Request, params: SamplingParams, position: int) -> _Live:
        limits = Stopping.of(request, params, self._context, self._decode)
        seed = request_key(params.seed, request.key) + position
        own = self._params(request, limits, params, seed, watches)
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": request.prompt_ids.tolist()}, own)
        return _Live(request, limits)

    def _piece(self, output: Any, live: dict[str, _Live]) -> Iterator[Piece]:
        """What vLLM has of a request; one that ends by our own rules ends."""
        own = live.get(output.request_id)
        if own is None:
            return
        (response,) = output.outputs
        new = list(response.token_ids)
        top = own.request.top_log_probs
        own.ids += new
        end = own.limits.end(own.ids, len(own.ids) - len(new))
        steps = [] if response.logprobs is None else list(response.logprobs)
        piece = Piece(int(output.request_id), new, [step[token].logprob for step, token in zip(steps, new, strict=True)])
        if top:
            piece.tops = [_most_likely(step, top) for step in steps]
        if output.prompt_logprobs and own.request.prompt_log_probs:  # later pieces have an empty list
            prompt = list(zip(output.prompt_logprobs, own.request.prompt_ids.tolist(), strict=True))
            piece.prompt = [math.nan if step is None else step[token].logprob for step, token in prompt]
            piece.prompt_tops = [[] if step is None or not top else _most_likely(step, top) for step, _ in prompt]
        if end is not None or output.finished:
            piece.reason = end[1] if end else "abort"
            del live[output.request_id]
            if not output.finished:
                self._llm.llm_engine.abort_request([output.request_id])
        yield piece

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

    def _params(self, request: Request, limits: Stopping, sampling: SamplingParams, seed: int, watches: bool) -> Any:
        kinds = self._vllm.sampling_params.RequestOutputKind
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_k=max(sampling.top_k, 0),
            top_p=max(sampling.top_p, 1e-9),  # vLLM refuses 0, which keeps the likeliest token alone
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            max_tokens=limits.max_tokens,
            stop_token_ids=sorted(limits.token_ids),
            ignore_eos=True,  # the tokens that end a response are those of the request
            seed=seed & _SEED_BITS,
            logprobs=request.top_log_probs,  # 0: of the drawn token alone
            prompt_logprobs=request.top_log_probs if request.prompt_log_probs else None,
            detokenize=False,
            output_kind=kinds.DELTA if watches or limits.strings or request.streams else kinds.FINAL_ONLY,
        )

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            self._tokenizer = hf_tokenizer(str(self._model.path), trust_remote_code=self._model.trust_remote_code)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _most_likely(step: Any, top: int) -> list[tuple[int, float]]:
    """The `top` most likely tokens, of a dictionary that may have another one."""
    ranked = sorted(step.items(), key=lambda item: item[1].rank)
    return [(token, own.logprob) for token, own in ranked[:top]]
