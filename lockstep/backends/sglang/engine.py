"""SGLangRollout: SGLang's HTTP server behind the rollout interface.

Written after SGLang's documentation of its native API (/generate with input_ids and return_logprob, /update_weights_from_disk,
/flush_cache, /abort_request, /release_memory_occupation, /resume_memory_occupation, /health). NOT RUN AGAINST REAL SGLANG: the tests
speak that API with a server of their own.
"""

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from lockstep.backends.sglang.server import SGLangServer
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, WeightSyncError, WorkerError
from lockstep.workers.rollout.base import ProcessRollout
from lockstep.workers.rollout.request import Completion, Job, Request, Stopping, Tokens, failed
from lockstep.workers.rollout.sampling import request_key
from lockstep.workers.rollout.stream import Stream
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, received
from lockstep.workers.weight_sync.disk import DiskOffer

_SEED_BITS = (1 << 31) - 1
_CACHE = {"tags": ["kv_cache"]}
_SAME_NAME = ("temperature", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class SGLangRollout(ProcessRollout):
    """See ProcessRollout. A response with stop strings is cut where one is complete, after it was generated to its limit.

    SGLang uses a request's seed, which is made from (seed, step, prompt, sample), only where it runs deterministically
    (--enable-deterministic-inference); otherwise a rerun draws other tokens.
    """

    def _start(self, model: ModelConfig, device: torch.device, dtype: str) -> None:
        config = self.config
        self._can_sleep = device.type == "cuda"
        self._is_asleep = False
        arguments = [
            "--model-path", self.folder, "--device", device.type, "--dtype", dtype,
            "--skip-tokenizer-init", "--log-level", "warning", "--random-seed", "0",
            "--max-running-requests", str(config.seats), "--chunked-prefill-size", str(config.pass_tokens),
            "--mem-fraction-static", str(config.cache_share),
        ]  # fmt: skip
        arguments += ["--json-model-override-args", json.dumps(model.override_config)] if model.override_config else []
        arguments += ["--trust-remote-code"] if model.trust_remote_code else []
        arguments += ["--disable-cuda-graph"] if config.enforce_eager else []
        arguments += ["--enable-memory-saver"] if self._can_sleep else []
        self.server = SGLangServer(arguments, start_s=config.start_timeout_s, silence_s=config.silence_timeout_s)

    def open(self, sampling: SamplingParams, *, num_tokens: int | None = None) -> Stream:
        """See RolloutEngine. Raises ConfigError: our way to SGLang takes a list of requests and gives it back."""
        raise ConfigError("rollout.name=sglang has no open streams here: use native, vllm or hf")

    def _open_for(self, requests: Sequence[Request], sampling: SamplingParams) -> Stream:
        self._wake()
        return SGLangStream(self, sampling)

    def sleep(self) -> None:
        if self._can_sleep and not self._is_asleep:
            self.server.post("/release_memory_occupation", _CACHE)
            self._is_asleep = True

    def close(self) -> None:
        self.server.close()

    def _wake(self) -> None:
        if self._is_asleep:
            self.server.post("/resume_memory_occupation", _CACHE)
            self._is_asleep = False

    def _load(self, offer: WeightOffer, device: torch.device, receiver: int) -> Manifest:
        if not isinstance(offer, DiskOffer):
            raise WeightSyncError(f"SGLang reads weights from files, it got a {type(offer).__name__}: use weight_sync=disk")
        manifest = {name: offer.manifest[name] for name, _ in received(offer, device, receiver)}
        for file in Path(self.folder).glob("*.json"):  # beside the weights SGLang looks for the model's config
            if "index" not in file.name:
                shutil.copy(file, offer.folder)
        self._wake()
        answer = self.server.post("/update_weights_from_disk", {"model_path": offer.folder})
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise WeightSyncError(f"SGLang did not load the weights of version {offer.version}: {answer}")
        self.server.post("/flush_cache", {})
        return manifest

    def answered(self, job: Job, answer: Any) -> Completion:
        """The completion from what the server answered. Raises WorkerError for an answer of another form."""
        try:
            meta = answer["meta_info"]
            tokens = [(float(log_prob), int(token)) for log_prob, token, *_ in meta["output_token_logprobs"]]
            if len(tokens) != meta["completion_tokens"]:
                raise ValueError(f"{len(tokens)} log-probs for {meta['completion_tokens']} tokens")
            aborted = meta["finish_reason"]["type"] == "abort"
        except (KeyError, TypeError, ValueError) as error:
            raise WorkerError(
                self.server.process.label, f"POST /generate was answered in another form ({error!r}): {answer}"
            ) from error
        ids = [token for _, token in tokens]
        length, reason = job.limits.end(ids) or (len(ids), "abort")
        if reason == "abort" and not aborted:
            why = f"SGLang ended it at {length} tokens for the reason {meta['finish_reason']}"
            return failed(job.index, job.request, why, self.version)
        return self.completed(job, ids[:length], [log_prob for log_prob, _ in tokens[:length]], reason)


class SGLangStream(Stream):
    """Requests that are all there at the start. Closing it aborts those that have no answer yet."""

    poll_s = 0.005  # SGLang computes in another process

    def __init__(self, engine: SGLangRollout, sampling: SamplingParams) -> None:
        super().__init__(engine, sampling)
        self._sglang = engine
        self._asked = dict[Future[Any], Job]()
        self._pool = ThreadPoolExecutor(engine.seats, "sglang")

    def _fault(self, job: Job) -> str | None:
        if job.request.top_log_probs or job.request.prompt_log_probs:
            return "rollout.name=sglang gives the log-probs of drawn tokens alone: use native, vllm or hf"
        return None

    def _work(self, arrived: Sequence[Job], aborted: set[int], left_s: float | None) -> list[Completion | Tokens]:
        for job in arrived:
            seed = request_key(job.params.seed, job.request.key)
            body = _body(job.request, job.limits, job.params, seed)
            self._asked[self._pool.submit(self._sglang.server.post, "/generate", body)] = job
        done, _ = wait(self._asked, left_s, FIRST_COMPLETED)
        return [self._sglang.answered(self._asked.pop(answer), answer.result()) for answer in done]

    def _shut(self) -> None:
        super()._shut()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not all(answer.done() for answer in self._asked) and not self._sglang.server.process.has_ended:
            self._sglang.server.post("/abort_request", {"rid": "", "abort_all": True})


def _body(request: Request, limits: Stopping, sampling: SamplingParams, seed: int) -> dict[str, Any]:
    return {
        "input_ids": request.prompt_ids.tolist(),
        "return_logprob": True,
        "sampling_params": {
            **{name: getattr(sampling, name) for name in _SAME_NAME},
            "top_p": max(sampling.top_p, 1e-9),  # SGLang refuses 0, which keeps the likeliest token alone
            "max_new_tokens": limits.max_tokens,
            "stop_token_ids": sorted(limits.token_ids),
            "ignore_eos": True,  # the tokens that end a response are those of the request
            "sampling_seed": seed & _SEED_BITS,
        },
    }
