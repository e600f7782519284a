"""What the models of a worker need on one device, from their configuration. Nothing is loaded: shapes come from models on the meta device.

Legend: P parameters, T those that learn, R ranks that share one copy of the state, C ranks that share every layer, e bytes of a number in
the computation.

```text
            weights           gradients            moments   gathered
fsdp        4 P / R           4 T / R              8 T / R   e P / C, or e (two layers and what is outside layers) / C
megatron    e P / C + 4 T/R   with the weights     8 T / R   with the weights
```

fsdp on one rank gathers nothing: it copies what it keeps in another type. That is nothing in float32 (e = 4), and of a model with adapters,
which is kept in the type of the computation, the adapters alone.

Gradients of several micro-batches are added up whole before they are divided: 4 T / C.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from lockstep.config.actor_rollout_ref import PPO_KEYS, ActorConfig, ActorRolloutRefConfig, Parts, PolicyKeys, RolloutConfig
from lockstep.config.check import AUTO, SCORED_TOKENS, TOKENS
from lockstep.config.critic import CriticConfig
from lockstep.config.engine import EngineChoice, FSDPConfig, ModelConfig
from lockstep.config.reward import RewardModelConfig
from lockstep.errors import DataError
from lockstep.models.chunked_head import MAX_LOGITS
from lockstep.models.fast_layers import has_fast_layers
from lockstep.models.flops import head_size, mlp_width
from lockstep.models.load import Head, outline
from lockstep.models.lora import Lora
from lockstep.models.recompute import activation_bytes, possible_kinds
from lockstep.models.scores import ScoreLayer
from lockstep.planner.memory import Keys, Model, Rollout

LEAST_SEQUENCES = 64
"""Sequences of the longest kind that a key-value cache should hold at once, where so many are generated. Models are offloaded for it."""
_FLOAT = 4
_LEFT = 0.9
"""Of the free memory, what the cache may take where nothing forbids it."""
_built: ContextVar[dict[Any, PreTrainedModel] | None] = ContextVar("built", default=None)
Footprint = tuple[Sequence[Model], Rollout | None]
"""The models on a device and what generates there, counted for one size of micro-batches."""


@dataclass(frozen=True)
class Load:
    """What one rank computes at once. A row is a prompt with its response."""

    longest: int
    """Tokens of the longest row."""
    step_rows: int
    """Rows of a step."""
    update_rows: int
    """Rows of an update."""
    unit: int = 1
    """Rows that are computed together."""
    auto_tokens: int | None = None
    """Tokens of a micro-batch where they are auto; None: no plan has chosen them."""

    def micro_batch(self, value: int | str, plain: int, ranks: int) -> int:
        """Tokens of a micro-batch that `ranks` ranks divide: a key's own number, or where it is auto what was chosen (else `plain`)."""
        if not isinstance(value, str):
            return value
        return max(self.auto_tokens or plain, -(-self.longest * self.unit // ranks))

    def tokens(self, max_tokens: int, max_rows: int | None, rows: int) -> int:
        """Tokens of the largest micro-batch that `rows` rows are cut into: by rows, or else by tokens."""
        return min(rows * self.longest, max_tokens if max_rows is None else max_rows * self.longest)


@dataclass(frozen=True)
class Needs:
    """What the models of one worker need, and what its device and its machine have before anything is loaded."""

    free: int
    """Bytes that are free on the device."""
    host: int
    """Bytes of host memory that are free on the machine."""
    machine: str
    """Its name: workers of one machine share that."""
    models: list[Model]
    rollout: Rollout | None = None
    options: Mapping[int, Footprint] = field(default_factory=dict)
    """Models and rollout for each size of micro-batches that may be chosen where that is auto; `models` has the smallest."""


# -- the models of a worker --------------------------------------------------------------------------------------------------


def policy_needs(
    config: ActorRolloutRefConfig,
    parts: Parts,
    names: PolicyKeys = PPO_KEYS,
    *,
    load: Load,
    world_size: int,
    element: int,
    head: Head = Head.LANGUAGE_MODEL,
) -> tuple[list[Model], Rollout | None]:
    """Return the needs of the actor, the reference and the rollout, if they are among `parts`.

    `element` is as in `count_model`; `names` are the keys for messages.
    """
    actor = config.actor
    ref = config.ref
    model = config.model
    options: Any = {"model": model, "head": head, "load": load, "world_size": world_size, "element": element}
    models = []
    if parts.actor:
        # With adapters the actor is the reference too, unless that is another model.
        is_reference = parts.reference and not config.loads_reference(parts)
        passes = ("old_log_prob", "ref") if is_reference else ("old_log_prob",)
        budget = (actor_tokens(actor, load), actor.ppo_micro_batch_size_per_gpu)
        less = _less(names.tokens, names.length, budget, load, actor, names.engine)
        keys = _trained_keys(names.engine, less, names.model)
        models.append(count_model("actor", keys, passes, "update_actor", choice=actor, budget=budget, **options))
    if config.loads_reference(parts):
        tokens = ref.log_prob_max_token_len_per_gpu or actor_tokens(actor, load)
        budget = (tokens, ref.log_prob_micro_batch_size_per_gpu)
        less = _less(names.reference_tokens, names.length, budget, load, config.reference_engine, names.engine)
        keys = Keys(less, names.reference_offload, moments=None, recompute=None)
        options["model"] = config.reference_model
        models.append(count_model("ref", keys, ("ref",), None, choice=config.reference_engine, budget=budget, **options))
    rollout = None
    if parts.rollout:
        source = actor if parts.actor else None
        rollout = count_rollout(config.rollout, model, actor=source, world_size=world_size, element=element, load=load)
    return models, rollout


def training_needs(config: CriticConfig | RewardModelConfig, *, load: Load, world_size: int, element: int) -> Model:
    """Return the needs of the critic or the reward model."""
    options: Any = {"choice": config, "model": config.model, "load": load, "world_size": world_size, "element": element}
    if isinstance(config, CriticConfig):
        budget = (scored_tokens(config, load), config.ppo_micro_batch_size_per_gpu)
        less = _less("critic.ppo_max_token_len_per_gpu", PPO_KEYS.length, budget, load, config, "critic")
        keys = _trained_keys("critic", less, "critic.model")
        return count_model("critic", keys, ("values",), "update_critic", head=Head.VALUE, budget=budget, **options)
    budget = (scored_tokens(config, load), config.micro_batch_size_per_gpu)
    less = _less("reward_model.max_token_len_per_gpu", PPO_KEYS.length, budget, load, config, "reward_model")
    keys = Keys(less, "reward_model.fsdp_config.param_offload", moments=None, recompute=None)
    return count_model("reward_model", keys, ("reward_model",), None, head=Head.SCORE, budget=budget, **options)


def actor_tokens(actor: ActorConfig, load: Load) -> int:
    """Return the tokens of a micro-batch of the actor under this load."""
    return load.micro_batch(actor.ppo_max_token_len_per_gpu, TOKENS, actor.token_ranks)


def scored_tokens(config: CriticConfig | RewardModelConfig, load: Load) -> int:
    """Return the tokens of a micro-batch of the critic or the reward model under this load."""
    if isinstance(config, CriticConfig):
        return load.micro_batch(config.ppo_max_token_len_per_gpu, TOKENS, config.token_ranks)
    # Nothing is kept of its passes, so its micro-batches are not the plan's to make smaller.
    alone = dataclasses.replace(load, auto_tokens=None)
    return alone.micro_batch(config.max_token_len_per_gpu, SCORED_TOKENS, config.token_ranks)


def _less(tokens: str, length: str, budget: tuple[int, int | None], load: Load, choice: EngineChoice, section: str) -> str:
    """Return the key that makes micro-batches of this budget smaller.

    That is the key of their tokens or rows; if each is one row, the key of its length, or of the ranks that divide it. `section` has the
    engine's keys.
    """
    max_tokens, max_rows = budget
    if max_rows is not None and max_rows > load.unit:
        return tokens.replace("max_token_len", "micro_batch_size")
    if max_rows is None and max_tokens * choice.token_ranks > load.longest * load.unit:
        return tokens
    if choice.strategy not in ("fsdp", "fsdp2") or choice.fsdp_config.tensor_parallel_size > 1:
        return length
    return f"{length}, or raise {section}.fsdp_config.ulysses_sequence_parallel_size, so that more GPUs divide each row"


def _trained_keys(section: str, less: str, model: str) -> Keys:
    """Return the keys of a model that learns; `less` makes its micro-batches smaller, `model` is the section of its model."""
    return Keys(
        less=less,
        weights=f"{section}.fsdp_config.param_offload",
        moments=f"{section}.fsdp_config.optimizer_offload",
        recompute=f"{model}.recompute=auto and {model}.enable_gradient_checkpointing=true",
    )


# -- one model, one rollout --------------------------------------------------------------------------------------------------


def count_model(
    name: str,
    keys: Keys,
    passes: tuple[str, ...],
    update: str | None,
    *,
    choice: EngineChoice,
    model: ModelConfig,
    head: Head,
    world_size: int,
    element: int,
    load: Load,
    budget: tuple[int, int | None],
) -> Model:
    """Return the needs of a model that computes in numbers of `element` bytes on `world_size` ranks, frozen if `update` is None.

    `budget` is the tokens, or the rows, of a micro-batch. Raise DataError if transformers cannot build the model with this head.
    """
    module = build(model, head)
    adapters = model.adapts and update is not None
    if adapters:
        Lora(module, model, head, seed=0)
    parameters = sum(p.numel() for p in module.parameters())
    trained = 0
    if update is not None:
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    tokens = {"pass": load.tokens(*budget, load.step_rows), "update": load.tokens(*budget, load.update_rows)}
    several = tokens["update"] < load.update_rows * load.longest
    state = _state(choice, module, parameters, trained, world_size, element, several)
    if adapters:  # what does not learn beside them is kept in the type of the computation
        state["weights"] -= (_FLOAT - element) * (parameters - trained) // _layout(choice, world_size)[1]

    offloads = choice.strategy in ("fsdp", "fsdp2")
    if offloads and world_size == 1:
        state["gathered"] = _copies(module, element, adapters)
    text = module.config.get_text_config()
    hidden = text.hidden_size
    layers = text.num_hidden_layers
    intermediate = mlp_width(text)
    logits = {"pass": 0, "update": 0}
    if head is Head.LANGUAGE_MODEL:
        logits = {stage: min(n * text.vocab_size, MAX_LOGITS["cuda"]) for stage, n in tokens.items()}
    section = choice.engine
    fast = isinstance(section, FSDPConfig) and element < _FLOAT and not section.use_torch_compile and has_fast_layers(module)
    kinds = _kinds(model, module) if update is not None else []
    return Model(
        name=name,
        keys=keys if offloads else dataclasses.replace(keys, weights=None, moments=None),
        passes=passes,
        beside=None,
        forward=tokens["pass"] * _pass_numbers(text, fast) * element,
        pass_logits=logits["pass"] * _FLOAT,
        update=update,
        activations={kind: activation_bytes(kind, tokens["update"], layers, hidden, intermediate, element, fast) for kind in kinds},
        update_logits=logits["update"] * (_FLOAT + element),
        param_offload=choice.fsdp_config.param_offload if offloads else False,
        optimizer_offload=choice.fsdp_config.optimizer_offload if offloads and update is not None else False,
        **state,
    )


def _cache_remedy(config: RolloutConfig, share: float, seats: int, longest: int) -> str:
    """Return the key to change if a cache of `share` of the free memory, for `seats` sequences, is too large."""
    shorter = "lower data.max_prompt_length or data.max_response_length"
    if config.max_num_seqs == AUTO or seats == 1:
        shorter += f": the cache must hold one row of {longest} tokens"
    else:
        key = "actor_rollout_ref.rollout.max_num_seqs"
        shorter = f"set {key}=auto, or below {seats}, so that fewer are generated at once, or {shorter}"
    if config.name == "native" and share < _LEFT:
        return f"raise actor_rollout_ref.rollout.gpu_memory_utilization={share:g}, or {shorter}"
    return shorter


def count_rollout(
    config: RolloutConfig,
    model: ModelConfig,
    *,
    actor: EngineChoice | None,
    world_size: int,
    element: int,
    load: Load,
) -> Rollout:
    """Return the needs of the rollout of `model`; `actor` is the engine of the actor in the same worker, if there is one."""
    module = build(model, Head.LANGUAGE_MODEL)
    text = module.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = head_size(text)
    token = cache_bytes(2 * text.num_hidden_layers * heads * size, size, element, config.kv_cache_dtype)
    seats = LEAST_SEQUENCES if config.max_num_seqs == AUTO else min(LEAST_SEQUENCES, config.seats)
    seats = min(seats, load.step_rows)
    cache = seats * load.longest * token
    share = _LEFT if config.gpu_memory_utilization == AUTO else config.cache_share
    in_process = config.name in ("native", "hf")
    plain = actor is not None and actor.strategy != "megatron" and not model.adapts
    return Rollout(
        weights=element * sum(p.numel() for p in module.parameters()),
        # The native cache gets this share of what is free.
        cache=int(cache / share) if config.name == "native" else cache,
        remedy=_cache_remedy(config, share, seats, load.longest),
        seats=seats,
        takes_fewer=config.max_num_seqs == AUTO,
        source="actor" if actor is not None else None,
        shares=in_process and plain and world_size == 1 and element == _FLOAT,
        # A copy on one rank keeps its place for captured graphs; gathered ones go. vllm's weights sleep with its cache, sglang's do not.
        keeps_weights=(actor is None or world_size == 1) if in_process else config.name == "sglang" or not config.free_cache_engine,
        keeps_cache=not config.free_cache_engine,
        engine=config.name,
        token_bytes=token,
        # Logits and the distribution that is drawn from.
        row_bytes=2 * _FLOAT * text.vocab_size,
        prompt_bytes=_pass_numbers(text, fast=True) * element,
        in_one_shape=config.batch_invariant,
    )


def _pass_numbers(text: Any, fast: bool) -> int:
    """Return the numbers per token that a pass without a gradient holds at once.

    A layer's parts are dropped as they are used: the stream, a norm, queries or keys; gate, up and their product. In a fast layer they live
    until it ends, and the stream (before, between and after its halves) is float32.
    """
    return int((16 if fast else 4) * text.hidden_size + 3 * mlp_width(text))


def _kinds(model: ModelConfig, module: PreTrainedModel) -> list[str]:
    """Return what may be recomputed; one kind if the user has decided it."""
    if not model.enable_gradient_checkpointing:
        return ["none"]
    return possible_kinds(module) if model.recompute == "auto" else [model.recompute]


def _state(
    choice: EngineChoice, module: PreTrainedModel, parameters: int, trained: int, world_size: int, element: int, several: bool
) -> dict[str, int]:
    """Return the bytes of weights, gradients, moments and gathered weights on one rank; `several`: an update has several micro-batches."""
    if choice.strategy == "megatron":
        megatron = choice.megatron
        part = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
        ranks = world_size if megatron.use_distributed_optimizer else part
        weights = element * parameters // part + _FLOAT * trained // part + _FLOAT * trained // ranks
        return {"weights": weights, "gradients": 0, "moments": 2 * _FLOAT * trained // ranks, "gathered": 0}
    part, ranks, keeps = _layout(choice, world_size)
    layers = [m for m in module.modules() if type(m).__name__ in set(module._no_split_modules or ())]
    inside = sum(p.numel() for layer in layers for p in layer.parameters())
    whole = parameters if keeps or not layers else parameters - inside + 2 * inside // len(layers)
    return {
        "weights": _FLOAT * parameters // ranks,
        "gradients": _FLOAT * trained // (part if several else ranks),
        "moments": 2 * _FLOAT * trained // ranks,
        "gathered": element * min(whole, parameters) // part,
    }


def _copies(module: PreTrainedModel, element: int, adapters: bool) -> int:
    """Return the bytes that one rank copies to compute: weights that it keeps in float32, except score layers, which compute in float32."""
    if element == _FLOAT:
        return 0
    scores = {id(p) for part in module.modules() if isinstance(part, ScoreLayer) for p in part.parameters()}
    return element * sum(p.numel() for p in module.parameters() if id(p) not in scores and (p.requires_grad or not adapters))


def _layout(choice: EngineChoice, world_size: int) -> tuple[int, int, bool]:
    """Return the ranks that share every layer, the ranks that share one copy of the state, and whether gathered layers stay for a stage."""
    if choice.strategy == "torchtitan":
        part = choice.torchtitan.tensor_parallel_size * choice.torchtitan.pipeline_parallel_size
        return part, world_size, world_size == 1
    if choice.strategy == "veomni":
        size = choice.veomni.fsdp_size
        return 1, world_size if size == -1 else size, world_size == 1
    fsdp = choice.fsdp_config
    part = fsdp.tensor_parallel_size
    copy = world_size // part if fsdp.fsdp_size == -1 else fsdp.fsdp_size
    return part, part * copy, world_size == 1 or not fsdp.reshard_after_forward


def cache_bytes(numbers: int, head_size: int, element: int, kept: str) -> int:
    """Return the bytes of so many numbers of a key-value cache: `element` each, or fewer (`kept` is `rollout.kv_cache_dtype`).

    (vllm's float8 has no scales for heads; it is counted as if it had, 3 % more for heads of 64.)
    """
    if kept == "auto":
        return numbers * element
    # Key and value of a KV head in one byte each, or in one and a half, and four for their scales.
    return numbers // (2 * head_size) * ((2 * head_size if kept == "fp8" else head_size * 3 // 2) + 4)


# -- models without weights --------------------------------------------------------------------------------------------------


def build(model: ModelConfig, head: Head) -> PreTrainedModel:
    """Return the model of `model.path` with this head, without weights; a model that gets adapters is the caller's own.

    Raise DataError if transformers cannot build it.
    """
    built = _built.get()
    key = (model.path, model.trust_remote_code, repr(model.override_config), head)
    may_share = built is not None and not model.adapts
    if built is not None and may_share and key in built:
        return built[key]
    try:
        module = outline(model, head)
    except ValueError as error:
        first = str(error).strip().splitlines()[0]
        raise DataError(f"{model.path} cannot be built as {head.name.lower()}: {first}") from error
    if built is not None and may_share:
        built[key] = module
    return module


@contextmanager
def reusing_models() -> Iterator[None]:
    """Inside, each model is built once: for a caller that counts many configurations of the same models."""
    outer = _built.get()
    token = _built.set({} if outer is None else outer)
    try:
        yield
    finally:
        _built.reset(token)
