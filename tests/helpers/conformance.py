"""Plain PyTorch to hold every training engine against: the Hugging Face model with its own attention, one row at a time, torch's AdamW
and gradient clipping, and the PPO losses written out token by token.

Everything is float32 on a CPU. What differs is only the order of additions, which bounds how far results may differ; AdamW divides a
gradient by its own size, so that weights differ by more than gradients do. What is held against it is in engine_properties.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from helpers.engines import TOTAL_UPDATES
from lockstep.algorithms.aggregation import Denominators
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.critic import CriticConfig
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.protocol import DataProto, Ragged
from lockstep.utils.quiet import quiet_transformers
from lockstep.workers.engine.base import LossFn, TrainEngine
from lockstep.workers.losses import make_policy_loss, make_value_loss

COLUMN_ATOL = 5e-6
"""Log-probs, entropies, values, scores."""
NUMBER_TOL = 1e-5
"""Metrics, absolute, and gradient norms, relative."""
WEIGHT_ATOL = 5e-6
"""After two or three steps at a learning rate of up to 1e-3, beside what GRADIENT_NOISE does."""
GRADIENT_NOISE = (2e-7, 2e-6)
"""Rounding of a gradient, as a share of the largest gradient of the model, in the first update and in later ones. AdamW divides a gradient
by its own size, so where it is nothing but this (the bias of keys) it becomes a step of any size; see `step_noise`."""

TEMPERATURE = 0.7
ACTOR = ActorConfig(
    entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=1.5
)
CRITIC = CriticConfig(cliprange_value=0.2)


# -- the data --------------------------------------------------------------------------------------------------------------


def make_rows(count: int = 6, seed: int = 0) -> list[dict[str, Tensor]]:
    """Rows of different lengths, one of them with an empty response; some response tokens are not the policy's."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        prompt_length, length = 1 + (3 * number) % 5, (2 + (5 * number) % 7) if number != 1 else 0
        mask = torch.rand(length, generator=generator) > 0.2
        mask[:1] = True

        def normal(scale: float, length: int = length) -> Tensor:
            return scale * torch.randn(length, generator=generator)

        rows.append(
            {
                "prompts": torch.randint(2, 32, (prompt_length,), generator=generator),
                "responses": torch.randint(2, 32, (length,), generator=generator),
                "response_mask": mask.long(),
                "old_log_probs": normal(0.5) - 3.5,
                "ref_log_prob": normal(0.5) - 3.5,
                "advantages": normal(1.0),
                "values": normal(0.5),
                "returns": normal(1.0),
            }
        )
    return rows


def batch_of(rows: list[dict[str, Tensor]]) -> DataProto:
    empty = make_rows(1)[0]
    columns = {name: Ragged.from_rows([row[name] for row in rows], dtype=empty[name].dtype if not rows else None) for name in empty}
    return DataProto.from_dict(columns)


def denominators_of(rows: list[dict[str, Tensor]]) -> Denominators:
    counts = [int(row["response_mask"].sum()) for row in rows]
    return Denominators(tokens=sum(counts), sequences=sum(count > 0 for count in counts))


# -- the reference ---------------------------------------------------------------------------------------------------------


def reference_model(path: str, head: Head, dtype: torch.dtype = torch.float32) -> Any:
    classes = {
        Head.LANGUAGE_MODEL: AutoModelForCausalLM,
        Head.VALUE: AutoModelForTokenClassification,
        Head.SCORE: AutoModelForSequenceClassification,
    }
    with quiet_transformers():
        model = classes[head].from_pretrained(path, attn_implementation="sdpa", dtype=dtype).eval()
    if dtype is torch.float64:
        model.set_experts_implementation("eager")  # grouped products have no float64
    return model


def reference_columns(model: Any, head: Head, row: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = torch.cat([row["prompts"], row["responses"]])
    before = slice(len(row["prompts"]) - 1, len(ids) - 1)
    logits = model(input_ids=ids[None]).logits[0, before]
    if head is Head.VALUE:
        return {"values": logits[:, 0]}
    log_probs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    own = log_probs[torch.arange(len(log_probs)), row["responses"]]
    return {"log_probs": own, "entropys": -(log_probs.exp() * log_probs).sum(-1)}


def reference_policy_terms(columns: dict[str, Tensor], row: dict[str, Tensor], t: int) -> dict[str, Tensor]:
    """One token of PPO's dual-clip loss, its entropy, and the k3 estimate of the KL to the reference, 10 at most."""
    advantage, log_prob = row["advantages"][t], columns["log_probs"][t]
    ratio = torch.exp(log_prob - row["old_log_probs"][t])
    clipped_ratio = torch.clamp(ratio, 0.9, 1.3)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped_ratio)
    clipfrac = torch.tensor(float(-advantage * clipped_ratio > -advantage * ratio))
    if advantage < 0:
        loss = torch.minimum(loss, -advantage * 1.5)
    log_r = row["ref_log_prob"][t] - log_prob
    return {
        "actor/pg_loss": loss,
        "actor/entropy_loss": columns["entropys"][t],
        "actor/kl_loss": (torch.exp(log_r) - log_r - 1).clamp(max=10.0),
        "actor/pg_clipfrac": clipfrac,
        "actor/ppo_kl": row["old_log_probs"][t] - log_prob,
    }


def reference_value_terms(columns: dict[str, Tensor], row: dict[str, Tensor], t: int) -> dict[str, Tensor]:
    value, old, target = columns["values"][t], row["values"][t], row["returns"][t]
    near = torch.clamp(value, old - 0.2, old + 0.2)
    return {
        "critic/vf_loss": 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2),
        "critic/vpred_mean": value,
        "critic/vf_clipfrac": torch.tensor(float((near - target) ** 2 > (value - target) ** 2)),
    }


def reference_step(model: Any, head: Head, optimizer: Any, rows: list[dict[str, Tensor]], update: int) -> dict[str, float]:
    """One optimizer step on the token mean over all rows; returns metrics, gradient norm and learning rate."""
    terms_of = reference_value_terms if head is Head.VALUE else reference_policy_terms
    totals: dict[str, Tensor] = {}
    tokens = 0
    for row in rows:
        columns = reference_columns(model, head, row)
        for t in row["response_mask"].nonzero().flatten().tolist():
            tokens += 1
            for name, term in terms_of(columns, row, t).items():
                totals[name] = totals.get(name, torch.zeros(())) + term
    means = {name: total / tokens for name, total in totals.items()}
    if head is Head.VALUE:
        loss = means["critic/vf_loss"]
    else:
        loss = means["actor/pg_loss"] - 0.01 * means["actor/entropy_loss"] + 0.1 * means["actor/kl_loss"]
        means["actor/loss"] = loss
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    lr = 1e-3 if update == 0 else 1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (update - 1) / (TOTAL_UPDATES - 2))))
    for group in optimizer.param_groups:
        group["lr"] = lr
    if hasattr(model, "step_noise"):
        model.step_noise = {name: model.step_noise[name] + noise for name, noise in step_noise(model, update).items()}
    optimizer.step()
    optimizer.zero_grad()
    return {name: mean.item() for name, mean in means.items()} | {"grad_norm": float(grad_norm), "lr": lr}


def reference_run(
    path: str, head: Head, steps: list[list[dict[str, Tensor]]], dtype: torch.dtype = torch.float32
) -> tuple[Any, list[dict[str, float]]]:
    model = reference_model(path, head, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    model.step_noise = dict.fromkeys(dict(model.named_parameters()), torch.zeros(()))
    return model, [reference_step(model, head, optimizer, rows, update) for update, rows in enumerate(steps)]


def step_noise(model: Any, update: int) -> dict[str, Tensor]:
    """How far rounding of the present gradients can move each weight: lr * noise / |gradient|, and no more than there and back."""
    gradients = {name: parameter.grad.abs() for name, parameter in model.named_parameters()}
    noise = GRADIENT_NOISE[update > 0] * max(gradient.max() for gradient in gradients.values())
    return {name: (1e-3 * noise / (gradient + 1e-12)).clamp(max=2e-3) for name, gradient in gradients.items()}


# -- the engine ------------------------------------------------------------------------------------------------------------


def share(rows: list[dict[str, Tensor]], update: int, rank: int, world: int) -> list[dict[str, Tensor]]:
    """This rank's rows: all of them; at two ranks 4 and 2 of 6, at more about as many each; in odd updates the first has them all."""
    if world == 1 or update % 2:
        return rows if rank == 0 else []
    bounds = [0, 2 * len(rows) // 3, len(rows)] if world == 2 else [len(rows) * r // world for r in range(world + 1)]
    return rows[bounds[rank] : bounds[rank + 1]]


def engine_step(
    engine: TrainEngine, rows: list[dict[str, Tensor]], update: int, budget: Budget
) -> tuple[dict[str, Any], dict[str, float]]:
    """One optimizer step; returns this rank's metrics and what the optimizer said."""
    mine = batch_of(share(rows, update, engine.rank, engine.world_size))
    loss_fn: LossFn
    if engine.head is Head.VALUE:
        loss_fn = make_value_loss(CRITIC).of(denominators_of(rows))
    else:
        loss_fn = make_policy_loss(ACTOR, 1.0).of(denominators_of(rows))
    metrics = engine.forward_backward(mine, loss_fn, budget, TEMPERATURE, entropy_grad=True)
    result = engine.optim_step()
    return metrics, {"grad_norm": result.grad_norm, "lr": result.lr}


def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.export_weights()}


def assert_weights_close(weights: dict[str, Tensor], model: Any, atol: float = WEIGHT_ATOL) -> None:
    expected = dict(model.named_parameters())
    assert set(weights) == set(expected)
    for name, tensor in weights.items():
        difference = (tensor - expected[name].detach()).abs()
        allowed = atol + (model.step_noise[name] if hasattr(model, "step_noise") else 0.0)
        worst = (difference / allowed).argmax()
        assert (difference <= allowed).all(), f"{name}: {difference.flatten()[worst]:.3g} at place {int(worst)}"


STEPS = [make_rows(6, seed=1), make_rows(6, seed=2)]
TWO_MICRO_BATCHES = Budget(max_tokens=10_000, max_rows=3)
