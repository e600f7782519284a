"""The two kinds of engines: over a module of this process, or in a process of their own (process.py)."""

import os
from abc import abstractmethod
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.utils.hf_config import read_model_config
from lockstep.utils.model_source import model_folder
from lockstep.workers.rollout.base import RolloutEngine, not_finite
from lockstep.workers.rollout.request import Completion, DecodeText, Job, TopLogProbs
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, check_equal, received
from lockstep.workers.weight_sync.module import copy_weights, module_manifest


class ModuleRollout(RolloutEngine):
    """An engine over `module`, a plain Hugging Face causal language model in this process."""

    attention: str
    """The attention function the module must be built with."""
    own_weights: bool = True
    """Whether the module's parameters are nobody else's tensors: then the engine may move them, as long as they are updated in place."""

    def __init__(
        self, module: PreTrainedModel, config: RolloutConfig, pad_token_id: int, decode_text: DecodeText | None = None
    ) -> None:
        super().__init__(module.config, config, pad_token_id, decode_text)
        self.module = module

    @torch.no_grad()
    def _load(self, offer: WeightOffer, device: torch.device, receiver: int) -> Manifest:
        weights = received(offer, device, receiver)
        copy_weights(self.module, weights)
        manifest = module_manifest(self.module, weights.manifest)
        check_equal(weights.manifest, manifest)
        return manifest


class ProcessRollout(RolloutEngine):
    """An engine that generates in a process of its own, with weights of its own.

    It starts with those of the model's folder and computes in `dtype`. Raises what `_start` raises, WorkerDied and WorkerTimeout
    (`config.start_timeout_s`, `config.silence_timeout_s`).
    """

    def __init__(
        self,
        model: ModelConfig,
        config: RolloutConfig,
        pad_token_id: int,
        device: torch.device,
        dtype: torch.dtype,
        decode_text: DecodeText | None = None,
    ) -> None:
        hf_config = read_model_config(str(model.path), model.trust_remote_code, **model.override_config)
        super().__init__(hf_config, config, pad_token_id, decode_text)
        self.folder = os.path.abspath(model_folder(str(model.path)))
        self._start(model, device, str(dtype).removeprefix("torch."))

    @abstractmethod
    def _start(self, model: ModelConfig, device: torch.device, dtype: str) -> None:
        """Start the process with the model of `self.folder`."""

    def completed(
        self, job: Job, ids: Sequence[int], log_probs: Sequence[float], reason: str, tops: TopLogProbs | None = None
    ) -> Completion:
        """What the process answered to a job; the log-probs say whether the logits were finite."""
        values = torch.tensor(log_probs, dtype=torch.float32)
        bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
        if bad:
            return not_finite(job.index, job.request, bad[0], self.version)
        if not self.gives_log_probs(job.params):
            values, tops = torch.full_like(values, torch.nan), None
        return Completion(job.index, torch.tensor(ids, dtype=torch.int64), values, reason, self.version, None, tops)

    def gives_log_probs(self, params: SamplingParams) -> bool:
        """See RolloutConfig.gives_log_probs."""
        return self.config.gives_log_probs(params.temperature, params.truncates, params.penalises)
