"""Distillation held against two plain modules, for every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.engine_properties import Layout
from helpers.tiny import save_tiny_model
from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.rows import Rows
from lockstep.models.chunked_kl import Divergence
from lockstep.models.packing import Budget
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.distill import set_teacher
from lockstep.workers.losses import make_distill_loss

KIND = Divergence(0.3, 0.8, None)


def assert_a_student_learns_as_in_plain_pytorch(
    layout: Layout, folder: Path, family: str = "llama", padding: int = 0, **changes: Any
) -> None:
    """The teacher is wider and deeper; `padding` tokens more in its vocabulary are never read. The value to 1e-5 in float32. The first
    step of AdamW goes against the sign of the gradient, so its direction shows it. A student that is its own teacher learns nothing."""
    student = save_tiny_model(folder / "student", family, **changes)
    vocab = AutoModelForCausalLM.from_pretrained(student).config.vocab_size
    wider = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": vocab + padding}
    teacher = save_tiny_model(folder / "teacher", family, **changes | wider)
    ranks = layout.run(_learned, layout, student, teacher)
    value, gradients = _plain(student, teacher, vocab)
    before, after, own = (values(merge_metrics([found[n] for found in ranks])) for n in range(3))
    assert before["train/kl"] == pytest.approx(value, rel=1e-5)
    assert after["train/kl"] < value
    assert own["train/kl"] == 0
    assert own["train/agreement"] == 1
    old = AutoModelForCausalLM.from_pretrained(student).state_dict()
    for *_, weights in ranks:
        for name, gradient in gradients.items():
            moved, large = weights[name] - old[name], gradient.abs() > 1e-4
            assert torch.equal(moved[large].sign(), -gradient[large].sign()), name


def _learned(layout: Layout, student_path: str, teacher_path: str) -> tuple[Any, ...]:
    """Metrics before and after an update, and of a student with itself; the weights after it. Every rank has rows of its own."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    student, teacher = layout.engine(student_path), layout.engine(teacher_path, optim=None)
    set_teacher(student, teacher, KIND)
    data = _rows()
    mask = data.ragged("response_mask")
    denominators = Denominators.of(mask.values, Rows(mask.lengths))
    mine = data.select_idxs(list(range(len(data)))[rank::world])
    loss = make_distill_loss("train").of(denominators)
    before = student.forward_backward(mine, loss, Budget(64, 1))
    student.optim_step()
    after = student.evaluate(mine, loss, Budget(64, None))
    weights = {name: tensor.detach().clone() for name, tensor in student.export_weights()}
    set_teacher(teacher, teacher, KIND)
    own = teacher.evaluate(mine, loss, Budget(64, None))
    return before, after, own, weights


def _rows() -> DataProto:
    prompts, responses = [[1, 2, 3], [4], [5, 6]], [[7, 8], [9, 10, 11, 12], [13, 14, 15]]
    columns: dict[str, Any] = {
        "prompts": Ragged.from_rows(prompts, dtype=torch.int64),
        "responses": Ragged.from_rows(responses, dtype=torch.int64),
        "response_mask": Ragged.from_rows([[1, 1], [1, 0, 1, 1], [1, 1, 0]], dtype=torch.int64),
        "is_given": torch.tensor([1.0, 0.0, 1.0]),
    }
    return DataProto.from_dict(columns, {"index": [0, 1, 2]})


def _plain(student_path: str, teacher_path: str, vocab: int) -> tuple[float, dict[str, Tensor]]:
    """The mean divergence by its definition, and its gradient."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(path) for path in (student_path, teacher_path))
    total, data, beta = torch.zeros(()), _rows(), KIND.beta
    for prompt, response, mask in zip(*(data.ragged(n).rows() for n in ("prompts", "responses", "response_mask")), strict=True):
        ids, start = torch.cat([prompt, response])[None], len(prompt) - 1
        log_p, log_q = (torch.log_softmax(m(ids).logits[0, start:-1, :vocab] / KIND.temperature, -1) for m in (student, teacher))
        p, q = log_p.exp(), log_q.exp().detach()
        mixture = (beta * q + (1 - beta) * p).log()
        value = beta * (q * (log_q.detach() - mixture)).sum(-1) + (1 - beta) * (p * (log_p - mixture)).sum(-1)
        total = total + (value * mask).sum()
    mean = total / data.ragged("response_mask").values.sum()
    mean.backward()
    return mean.item(), {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
