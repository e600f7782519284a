"""A student's columns with a teacher, on one rank and on two, against two plain modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.rows import Rows
from lockstep.errors import ConfigError
from lockstep.models.chunked_kl import Divergence
from lockstep.models.packing import Budget
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.distill_loss import make_distill_loss
from lockstep.workers.engine.teacher import set_teacher

KIND = Divergence(0.3, 0.8, None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A student, and a teacher that is wider and whose vocabulary is padded."""
    paths = []
    for size, vocab in ((16, 24), (32, 26)):
        torch.manual_seed(size)
        config = LlamaConfig(
            hidden_size=size, intermediate_size=2 * size, num_hidden_layers=2, num_attention_heads=2, vocab_size=vocab,
            max_position_embeddings=64, tie_word_embeddings=False,
        )  # fmt: skip
        paths.append(str(tmp_path_factory.mktemp("model")))
        LlamaForCausalLM(config).save_pretrained(paths[-1])
    return paths[0], paths[1]


def rows() -> DataProto:
    prompts, responses = [[1, 2, 3], [4], [5, 6]], [[7, 8], [9, 10, 11, 12], [13, 14, 15]]
    columns: dict[str, Any] = {
        "prompts": Ragged.from_rows(prompts, dtype=torch.int64),
        "responses": Ragged.from_rows(responses, dtype=torch.int64),
        "response_mask": Ragged.from_rows([[1, 1], [1, 0, 1, 1], [1, 1, 0]], dtype=torch.int64),
        "is_given": torch.tensor([1.0, 0.0, 1.0]),
    }
    return DataProto.from_dict(columns, {"index": [0, 1, 2]})


def learned(models: tuple[str, str], strategy: str) -> tuple[float, float, dict[str, Tensor]]:
    """Divergence before and after an update, and the weights after it. Every rank has a row or two of its own."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    student, teacher = make_tiny_engine(models[0], strategy), make_tiny_engine(models[1], strategy, optim=None)
    set_teacher(student, teacher, KIND)
    data = rows()
    mask = data.ragged("response_mask")
    denominators = Denominators.of(mask.values, Rows(mask.lengths))
    mine = data.select_idxs(list(range(len(data)))[rank::world])
    loss = make_distill_loss("train")
    before = student.forward_backward(mine, lambda *a: loss(*a, denominators=denominators), Budget(64, 1))
    student.optim_step()
    after = student.evaluate(mine, lambda *a: loss(*a, denominators=denominators), Budget(64, None))
    weights = {name: tensor.detach().clone() for name, tensor in student.export_weights()}
    return before["train/kl"].value, after["train/kl"].value, weights


def plain(models: tuple[str, str]) -> tuple[float, dict[str, Tensor]]:
    """The mean divergence by its definition, and its gradient."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(path) for path in models)
    total, data, beta = torch.zeros(()), rows(), KIND.beta
    for prompt, response, mask in zip(*(data.ragged(n).rows() for n in ("prompts", "responses", "response_mask")), strict=True):
        ids, start = torch.cat([prompt, response])[None], len(prompt) - 1
        log_p, log_q = (torch.log_softmax(m(ids).logits[0, start:-1, :24] / KIND.temperature, -1) for m in (student, teacher))
        p, q = log_p.exp(), log_q.exp().detach()
        mixture = (beta * q + (1 - beta) * p).log()
        value = beta * (q * (log_q.detach() - mixture)).sum(-1) + (1 - beta) * (p * (log_p - mixture)).sum(-1)
        total = total + (value * mask).sum()
    mean = total / data.ragged("response_mask").values.sum()
    mean.backward()
    return mean.item(), {name: p.grad for name, p in student.named_parameters()}


@pytest.mark.parametrize(("strategy", "world"), [("fsdp2", 1), ("fsdp2", 2), ("fsdp", 2)])
def test_an_update_is_that_of_two_plain_modules_however_they_are_sharded(
    models: tuple[str, str], strategy: str, world: int
) -> None:
    """The first step of AdamW goes against the sign of the gradient, so its direction shows it; the value to 1e-5 in float32."""
    results = run_distributed(learned, world, models, strategy)
    value, gradients = plain(models)
    counts = [sum((1, 1, 1, 0, 1, 1, 1, 1, 0)[a:b]) for a, b in ((0, 2), (2, 6), (6, 9))]
    shares = [sum(counts[rank::world]) for rank in range(world)]
    before = sum(share * result[0] for share, result in zip(shares, results, strict=True)) / sum(counts)
    assert before == pytest.approx(value, rel=1e-5)
    assert sum(share * result[1] for share, result in zip(shares, results, strict=True)) / sum(counts) < value
    old = AutoModelForCausalLM.from_pretrained(models[0]).state_dict()
    for name, gradient in gradients.items():
        moved, large = results[0][2][name] - old[name], gradient.abs() > 1e-4
        assert torch.equal(moved[large].sign(), -gradient[large].sign()), name


def test_a_model_that_makes_its_own_logits_is_refused() -> None:
    class Without:
        tokens_at_once = None

    engine: Any = Without()
    with pytest.raises(ConfigError, match=r"model\.path are not its output layer's"):
        set_teacher(engine, engine, KIND)
