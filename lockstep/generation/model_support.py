"""Which models the native engine computes: families, what their keys and values look like, and whether paged generation computes what the
module computes itself.

FAMILIES and MIXTURES have the decoder layer that cpu/fused_backend.py and gpu/fused.py compute by hand; keys and values in fewer bits
(gpu/tiles.py) want more of them. transformers' families differ in what they give to an attention function. A family that keeps state
elsewhere, or reads a mask of its own, would be computed wrongly and without a word, so the engine compares before it generates.
"""

from typing import NoReturn

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.errors import ConfigError, NumericalError
from lockstep.generation.cpu.passes import PassBackend, batch_of
from lockstep.generation.pages import CacheShape
from lockstep.generation.scheduler import Pass, PassRow, Prompt, Sample
from lockstep.models.attention import Variant
from lockstep.models.flops import head_size
from lockstep.workers.rollout.request import Stopping

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Norm, attention with rotary positions, norm, gated MLP."""
MIXTURES = ("mixtral", "qwen3_moe")
"""The same with a mixture of experts in the place of the MLP, or of some: for gpu/fused.py."""
_ROPE_OF_POSITION = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone; the others also look at the longest sequence of the batch."""


def is_fusable(config: PretrainedConfig, *, mixtures: bool = False) -> bool:
    """Whether cpu/fused_backend.py and gpu/fused.py can compute a model of this config; `mixtures` too only where the latter is meant."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        (config.model_type in FAMILIES or (mixtures and config.model_type in MIXTURES))
        and getattr(config, "hidden_act", None) == "silu"
        and rope.get("rope_type", "default") in _ROPE_OF_POSITION
        and getattr(config, "partial_rotary_factor", 1.0) in (None, 1.0)
        and not getattr(config, "router_jitter_noise", 0.0)
    )


_FLOAT8_HEADS = (32, 64, 128, 256)
"""Sizes of a head that kernels for float8 pages take."""
_FLOAT8_SINCE = (8, 9)
"""The first compute capability whose GPUs turn float8 into float16."""


def check_small_cache(module: PreTrainedModel, rollout: RolloutConfig) -> None:
    """Raise ConfigError unless keys and values of this model can be kept in fewer bits where it is. It must have its weights."""
    check_small_cache_config(module.config, module.device.type, module.dtype, rollout)
    check_small_cache_capability(torch.cuda.get_device_capability(module.device), rollout)


def check_small_cache_capability(capability: tuple[int, int], rollout: RolloutConfig) -> None:
    """Raise ConfigError for a GPU that is too old."""
    if capability < _FLOAT8_SINCE:
        _refuse(rollout, "a GPU of compute capability 8.9 or newer", "this one has {}.{}".format(*capability))


def check_small_cache_config(config: PretrainedConfig, device_type: str, dtype: torch.dtype, rollout: RolloutConfig) -> None:
    """The same as far as it is known before anything is loaded; which models others than the native engine do it for is theirs to say."""
    family = config.model_type
    if device_type != "cuda":
        _refuse(rollout, "a GPU", f"the device is {device_type} (trainer.device)")
    if rollout.name != "native":
        return
    if dtype != torch.bfloat16:
        computed = str(dtype).removeprefix("torch.")
        found = f"this one does in {computed} (actor_rollout_ref.actor.fsdp_config.dtype)"
        _refuse(rollout, "a model that computes in bfloat16", found)
    if family not in FAMILIES + MIXTURES:
        _refuse(rollout, f"a model of the families {', '.join(FAMILIES + MIXTURES)}", f"this one is a {family}")
    if not is_fusable(config, mixtures=True):
        _refuse(rollout, "SiLU and rotary positions of a common kind", f"this {family} has others")
    sizes = [str(each) for each in _FLOAT8_HEADS]
    size = head_size(config.get_text_config())
    if str(size) not in sizes:
        _refuse(rollout, f"heads of {', '.join(sizes[:-1])} or {sizes[-1]} numbers", f"this model's have {size}")


def _refuse(rollout: RolloutConfig, needed: str, found: str) -> NoReturn:
    key = f"actor_rollout_ref.rollout.kv_cache_dtype={rollout.kv_cache_dtype}"
    raise ConfigError(f"{key} needs {needed}, and {found}; set it to auto")


_PROMPTS = (7, 3)
"""Lengths of the two prompts that are compared."""
_DECODED = 2
"""Tokens after each."""
_FAILURES = (TypeError, ValueError, KeyError, AttributeError, RuntimeError, IndexError)
"""What a module may raise whose attention is another than ours."""


class UnsupportedModel(ConfigError):
    """A model that the native engine cannot generate from; carries the family and the reason."""


class _Recorder:
    """A KeyValueCache that attends within one token, where the output is the value itself, and notes the shapes."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        self.dtype = torch.float32

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        self.shapes[layer] = (key.shape[1], key.shape[3])
        self.dtype = key.dtype
        return value.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(1, 2)


@torch.no_grad()
def cache_shape(module: PreTrainedModel, page_size: int, kept: str = "auto") -> CacheShape:
    """The shape of the module's keys and values. Raises UnsupportedModel unless every layer has the same."""
    recorder = _Recorder()
    token = torch.zeros(1, 1, dtype=torch.int64, device=module.device)
    try:
        module(input_ids=token, position_ids=token, use_cache=False, kv_cache=recorder)
    except _FAILURES as error:
        raise _unsupported(module, f"its attention cannot be replaced ({_first_line(error)})") from error
    if not recorder.shapes:
        raise _unsupported(module, "it has no attention that goes through transformers' attention interface")
    shapes = set(recorder.shapes.values())
    if len(shapes) > 1:
        raise _unsupported(module, f"its layers have keys of different shapes: {sorted(shapes)} (heads, size of a head)")
    return CacheShape(max(recorder.shapes) + 1, *shapes.pop(), page_size, recorder.dtype, kept)


@torch.no_grad()
def check_equivalence(module: PreTrainedModel, backend: PassBackend) -> None:
    """Raise UnsupportedModel unless prompts and decoded tokens give the logits that the module gives to each whole sequence, NumericalError
    where those are not finite: nobody can generate from such a model."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = module.config.get_text_config().vocab_size
    rows = [torch.randint(0, vocabulary, (length + _DECODED,), generator=generator) for length in _PROMPTS]
    paged: list[list[Tensor]] = [[] for _ in rows]
    pages = -(-(max(_PROMPTS) + _DECODED) // backend.page_size)
    backend.open(1 + pages * len(rows))
    never = Stopping(_DECODED, frozenset(), (), None)
    samples = [
        Sample(i, Prompt(row.tolist()), never, pages=[*range(1 + i * pages, 1 + (i + 1) * pages)]) for i, row in enumerate(rows)
    ]
    attention = module.config._attn_implementation
    try:
        with backend.ready():
            for counts in (_PROMPTS, *[(1,) * len(rows)] * _DECODED):
                planned = [PassRow(sample, count) for sample, count in zip(samples, counts, strict=True)]
                batch = batch_of(Pass(planned), backend.page_size)
                logits = backend.forward(batch, torch.arange(len(batch.input_ids)))
                for row, out, part in zip(planned, paged, logits.split(counts), strict=True):
                    out.append(part.clone())
                    row.sample.num_cached += row.count
        module.set_attn_implementation("eager")
        alone = [module(input_ids=row[None].to(module.device), use_cache=False).logits[0].float() for row in rows]
    except _FAILURES as error:
        raise _unsupported(module, f"generating with a paged cache fails ({_first_line(error)})") from error
    finally:
        module.set_attn_implementation(attention)
        backend.close()
    mine = torch.cat([torch.cat(parts).float() for parts in paged])
    theirs = torch.cat(alone)
    if not theirs.isfinite().all():
        precision = str(module.dtype).removeprefix("torch.")
        raise NumericalError(
            f"{type(module).__name__} gives logits that are not finite, by its own forward: its weights are damaged, or too large for "
            f"{precision}; take another checkpoint, or another precision"
        )
    # In half precision roundings alone are 0.15 of the logits' spread (SmolLM2-135M on a CPU); another attention makes it about 1.
    spread = (theirs - theirs.mean(-1, keepdim=True)).square().mean().sqrt().item()
    difference = (mine - theirs).square().mean().sqrt().item()
    tolerance = 1e-3 if backend.shape.dtype == torch.float32 else 0.5
    if not difference <= tolerance * spread:
        raise _unsupported(module, f"it attends in another way: logits that spread by {spread:.2g} differ by {difference:.2g}")


def _unsupported(module: PreTrainedModel, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the native engine cannot generate from {type(module).__name__}: {reason}. "
        "Set actor_rollout_ref.rollout.fallback_to_hf=true to generate with transformers instead, which is slow"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
