"""What a module is: what its keys and values look like, and whether paged generation computes what it computes itself.

transformers' families differ in what they give to an attention function. A family that keeps state elsewhere, or reads a mask of its
own, would be computed wrongly and without a word, so the engine compares before it generates.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.errors import ConfigError, NumericalError
from lockstep.generation.cpu.passes import PassBackend, batch_of
from lockstep.generation.pages import CacheShape
from lockstep.generation.scheduler import Pass, PassRow, Prompt, Sample
from lockstep.models.attention import Variant
from lockstep.workers.rollout.request import Stopping

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
