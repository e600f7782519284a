"""Load a Hugging Face model with the head that a role needs."""

import copy
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedModel,
)

from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError, DataError
from lockstep.models.attention import PACKED, PackedLayout
from lockstep.models.hf_config import packed_limit, read_model_config
from lockstep.models.scores import ReadsScores, read_scores
from lockstep.models.source import model_folder
from lockstep.models.weight_files import WeightFiles, WeightSource, check_finite
from lockstep.utils.quiet import quiet_transformers


class Head(Enum):
    """What the model puts on top of its hidden states."""

    LANGUAGE_MODEL = AutoModelForCausalLM
    """Logits over the vocabulary: actor, reference, rollout."""
    VALUE = AutoModelForTokenClassification
    """One number per token (token classification with one label): critic."""
    SCORE = AutoModelForSequenceClassification
    """One number per sequence (sequence classification with one label): reward model."""


_SCORING = ("ForSequenceClassification", "ForTokenClassification")
"""The ends of class names of reward models and critics."""


def _reason(error: Exception) -> str:
    """Return in one line why transformers did not load the weights, and what to do."""
    first = str(error).strip().splitlines()[0]
    if "ignore_mismatched_sizes" in first:  # its table is for a terminal
        return "tensors in them have other sizes than config.json says; are both of one model?"
    if first.strip("'\"") == PACKED:
        return "its attention is one of a fixed table, which attention over packed rows is not in; choose a model of another family"
    if first.startswith("Unrecognized configuration class"):
        return f"{first.rstrip('.')}: transformers has no such head for it; take another family (for a critic, critic.model.path)"
    if "no file named" in first:
        return f"{first.removeprefix('Error ').rstrip('.')}; copy or download it again"
    return first


def load_model(
    config: ModelConfig, head: Head, seed: int, pad_token_id: int | None = None, trained: bool = False, packs: bool = True
) -> PreTrainedModel:
    """Return the model in float32 on the CPU, in evaluation mode, with our packed attention.

    With `packs` (the model will compute packed rows) `check_packing` runs once, which takes longer than loading a small model.

    It trains in evaluation mode too: with dropout, noise in routers and dropped layers the trained policy would not be the sampled one.

    If the folder has no value head, or no score head for a model that is to be `trained`, the head is drawn from `seed`, so that every rank
    has the same (`draw_weights`). Raise DataError for any other weight that is missing or has another shape, for a folder that is not a
    model, and for a family without such a head in transformers.
    """
    assert config.path is not None, "the composition root fills in a path"
    hf_config = head_config(config, head, pad_token_id)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        try:
            model, report = head.value.from_pretrained(
                model_folder(config.path),
                config=hf_config,
                dtype=torch.float32,
                attn_implementation=PACKED,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise DataError(f"the weights of {config.path} cannot be loaded as {head.name.lower()}: {_reason(error)}") from error
    # transformers draws what it does not find; only a new head is meant to be drawn.
    missing = _not_drawn(report["missing_keys"], model, head, trained)
    if missing:
        raise DataError(
            f"the weights of {config.path} are incomplete for {head.name.lower()}: {len(missing)} missing, first {sorted(missing)[:3]}; "
            "is it the right kind of model?"
        )
    if head is Head.SCORE:
        for name in report["missing_keys"]:
            model.get_parameter(name).data.copy_(draw_weights(model, name, seed, _std(model, head)))
    for name, parameter in model.named_parameters():
        check_finite(name, parameter.detach(), str(config.path))
    _prepare(model, head)
    if packs:
        check_packing(model, model, config.path, torch.device("cpu"), torch.float32)
    return model


# -- without weights in memory: each rank of a sharded model reads its own part and nothing else -----------------------------


def load_on_meta(
    config: ModelConfig, head: Head, seed: int, pad_token_id: int | None = None, trained: bool = False
) -> tuple[PreTrainedModel, WeightSource] | None:
    """Return the model of `load_model` without its weights, and what fills it; the caller runs `check_packing` on the filled model.

    None if the weights are not safetensors, or do not fit the model name by name: `load_model` converts them, or raises with what is wrong.
    """
    assert config.path is not None, "the composition root fills in a path"
    folder = model_folder(config.path)
    files = WeightFiles(Path(folder))
    try:
        model = model_on_meta(config, head, pad_token_id)
    except ValueError:
        return None
    missing = missing_weights(model, files)
    if missing is None or _not_drawn(missing, model, head, trained):
        return None
    if model.can_generate() and (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    _prepare(model, head)
    drawn = {name: draw_weights(model, name, seed, _std(model, head)) for name in missing}
    return model, WeightSource(files, drawn)


def model_on_meta(config: ModelConfig, head: Head, pad_token_id: int | None = None) -> PreTrainedModel:
    """Return the model without weights, from its config alone. Raise ValueError if transformers has no such head for it."""
    hf_config = head_config(config, head, pad_token_id)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        return build_on_meta(
            head.value,
            hf_config,
            dtype=torch.float32,
            attn_implementation=PACKED,
            trust_remote_code=config.trust_remote_code,
        )


def outline(config: ModelConfig, head: Head) -> PreTrainedModel:
    """Return `model_on_meta` for counting and naming: buffers are not in memory either, and no parameter is for a moment.

    (The experts of one DeepSeek-V3 layer are 30 GB.)
    """
    with torch.device("meta"):
        return model_on_meta(config, head)


def head_config(config: ModelConfig, head: Head, pad_token_id: int | None = None) -> Any:
    """Return the model's config for this head.

    Raise DataError for a reward model or a critic as a language model: with tied weights it would load, and write nonsense.
    """
    overrides = dict(config.override_config)
    if head is not Head.LANGUAGE_MODEL:
        overrides["num_labels"] = 1
    hf_config = read_model_config(str(config.path), config.trust_remote_code, **overrides)
    kind = next((name for name in hf_config.architectures or () if name.endswith(_SCORING)), None)
    if head is Head.LANGUAGE_MODEL and kind is not None:
        raise DataError(f"{config.path} is a {kind}, which scores texts and writes none; name a language model")
    if pad_token_id is not None:
        hf_config.pad_token_id = pad_token_id
    return hf_config


def take_weights(model: PreTrainedModel) -> WeightSource:
    """Move the parameters of a model that is in memory to the meta device. Return their values, to fill it or a shard of it."""
    given = {name: parameter.detach() for name, parameter in model.named_parameters()}
    on_meta = {id(p): nn.Parameter(p.to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = on_meta[id(parameter)]
    return WeightSource(None, given)


def build_on_meta(factory: Any, hf_config: Any, **options: Any) -> PreTrainedModel:
    """Return the model of a config with parameters on the meta device, which take no memory, and buffers in memory.

    `factory` is one of transformers' Auto classes; `options` go to its from_config.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        return factory.from_config(hf_config, **options)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def missing_weights(model: PreTrainedModel, files: WeightFiles) -> list[str] | None:
    """Return the names of the model's parameters that the files lack.

    None if the files cannot fill the model name by name: a shape differs, or a saved buffer is needed. (Families whose files hold their
    weights in another form, as experts one by one, lack names.)
    """
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if any(shape != files.shapes.get(name, shape) for name, shape in wanted.items()):
        return None
    if any(set(module._buffers) - module._non_persistent_buffers_set for module in model.modules()):
        return None
    return [name for name in wanted if name not in files.shapes]


def draw_weights(model: PreTrainedModel, name: str, seed: int, std: float | None = None) -> Tensor:
    """Return a new value for a parameter of a linear layer, from `seed` alone: normal around 0 with `std`, or as transformers draws it."""
    layer = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(layer, nn.Linear), f"{name} is not in a linear layer"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        torch.manual_seed(seed)
        if std is None:
            model._init_weights(drawn)
        else:
            nn.init.normal_(drawn.weight, std=std)
    return dict(drawn.named_parameters())[name.rpartition(".")[2]].detach()


def _not_drawn(missing: Iterable[str], model: PreTrainedModel, head: Head, trained: bool) -> list[str]:
    """Return the missing weights that have to be in the folder."""
    is_new = head is Head.VALUE or (head is Head.SCORE and trained)
    return [name for name in missing if not is_new or name.startswith(f"{model.base_model_prefix}.")]


def _std(model: PreTrainedModel, head: Head) -> float | None:
    """Return the spread of a new score head: scores start so near to 0 that any two rows are nearly equal."""
    return 1 / (model.config.get_text_config().hidden_size + 1) if head is Head.SCORE else None


def _prepare(model: PreTrainedModel, head: Head) -> None:
    model.eval()
    refuse_long_rows(model)
    if head is Head.SCORE:
        read_scores(model)


def share_structure(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Return a second module tree over the SAME parameters with another attention function: training and decoding share the weights."""
    memo = {id(parameter): parameter for parameter in model.parameters()}
    twin = copy.deepcopy(model, memo)
    twin.set_attn_implementation(_own_attention(model) if attention == "sdpa" else attention)
    return twin.eval()


# -- packed rows -------------------------------------------------------------------------------------------------------------


def refuse_long_rows(model: PreTrainedModel) -> None:
    """Let the forward pass of packed rows raise ConfigError for rows longer than the model computes alike beside any other rows."""
    limit = packed_limit(model.config)
    if limit is None:
        return
    for module in model.modules():
        # Llama 4 scales queries by their place in the pass, not in the row. In rows within the limit every scale is 1.
        if hasattr(module, "attn_temperature_tuning"):
            scaled: Any = module
            scaled.attn_temperature_tuning = False

    def check(module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        layout = inputs.get("layout")
        if layout is not None and layout.longest > limit.tokens:
            raise ConfigError(
                f"a row has {layout.longest} tokens, but {type(model).__name__} computes at most {limit}; lower the lengths of prompts "
                "and responses (data.max_prompt_length, data.max_response_length, data.max_length)"
            )

    model.register_forward_pre_hook(check, with_kwargs=True)


_FAILURES = (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, AssertionError)
"""Errors of a model that calls attention in another way than packed_attention expects."""


@torch.no_grad()
def check_packing(module: nn.Module, model: PreTrainedModel, path: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError unless two packed rows, whole and with their prompt shared, give what each gives alone with transformers' own
    attention. `module` is the model as it is called: itself, or what shards it (then every rank has to call this).

    transformers leaves the mask to our attention function, so a family with another kind of attention (linear, ALiBi) would silently be
    computed wrongly.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompt, one, two = (torch.randint(0, vocabulary, (n,), generator=generator).to(device) for n in (3, 4, 2))
    whole, other = torch.cat([prompt, one]), torch.cat([prompt, two])
    logits = partial(_logits, module, isinstance(model, ReadsScores))
    advice = "choose a model with causal softmax attention that goes through transformers' attention interface"
    try:
        packed = _packed_logits(logits, [whole, other], [0, 0], PackedLayout(torch.tensor([7, 5]), device))
        layout = PackedLayout(torch.tensor([3, 4, 2]), device, followers=[2])
        shared = _packed_logits(logits, [prompt, one, two], [0, 3, 3], layout)
        model.set_attn_implementation(_own_attention(model))
        try:
            rows = ({"input_ids": row[None], "use_cache": False} for row in (whole, other))
            alone = torch.cat([logits(row) for row in rows])
        finally:
            model.set_attn_implementation(PACKED)
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{type(model).__name__} ({path}) cannot compute packed rows ({reason}); {advice}") from error
    difference = max((packed - alone).abs().max().item(), (shared - torch.cat([alone[:7], alone[10:]])).abs().max().item())
    scale = alone.abs().max().item()
    if not difference <= (1e-3 if dtype == torch.float32 else 0.1) * scale:
        raise ConfigError(
            f"{type(model).__name__} ({path}) attends in a way that packed rows do not reproduce: logits up to {scale:.2g} differ by "
            f"{difference:.2g}; {advice}"
        )


def _own_attention(model: PreTrainedModel) -> str:
    """Return the name of transformers' own attention function; families with soft-capped scores or sinks have no fused one."""
    # The fused function of transformers 5.17 ignores the soft cap.
    soft_cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and soft_cap is None else "eager"


def _packed_logits(
    logits: Callable[[dict[str, Any]], Tensor], segments: list[Tensor], first_positions: list[int], layout: PackedLayout
) -> Tensor:
    positions = torch.cat([start + torch.arange(len(ids)) for start, ids in zip(first_positions, segments, strict=True)])
    ids = torch.cat(segments)[None]
    inputs = {"input_ids": ids, "position_ids": positions[None].to(ids.device), "use_cache": False, "layout": layout}
    return logits(inputs)


def _logits(module: nn.Module, scored: bool, inputs: dict[str, Any]) -> Tensor:
    """Return the model's output at each of N tokens: logits [N, V], or scores [N]."""
    ids = inputs["input_ids"]
    return module(**inputs, read_at=torch.arange(ids.shape[1])) if scored else module(**inputs).logits[0].float()
