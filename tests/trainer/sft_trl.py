"""Write sft_trl.json: what two updates of TRL's SFTTrainer make of rows in each form, on a CPU, in float32. Run it where TRL is installed,
with the repository's root and tests/ on PYTHONPATH; the tests read the file.

TRL masks by its own means: {% generation %} markers in the template for messages, the prompt's tokens for completions.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import trl
from datasets import Dataset
from helpers.conformance import step_noise
from helpers.tiny import tiny_model
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from lockstep.embedded.task import make_tokenizer

ROWS_PER_STEP, EVERY = 4, 97
"""Every 97th number of each weight is kept."""
MARKED = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""The embedded task's template, with markers."""
WORDS = ["abc", "cabde", "hi", "facejig", "dig", "beadaceh", "gab", "chad"]


def conversation(word: str) -> list[dict[str, str]]:
    """Two turns, of different lengths."""
    turns = [("user", word), ("assistant", word[::-1] + "<eos>"), ("user", word[1:]), ("assistant", word[:0:-1] + "<eos>")]
    return [{"role": role, "content": content} for role, content in turns]


ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": conversation(word)} for word in WORDS],
    "completion": [{"prompt": word, "completion": word[::-1]} for word in WORDS],
    "completion of messages": [{"prompt": conversation(word)[:3], "completion": conversation(word)[3:]} for word in WORDS],
    "text": [{"text": word + word[::-1]} for word in WORDS],
}


class Noise(TrainerCallback):
    """How far rounding may move each weight, added up over the updates."""

    def __init__(self) -> None:
        self.noise: dict[str, torch.Tensor] = {}
        self.updates = 0

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        for name, noise in step_noise(model, self.updates).items():
            self.noise[name] = self.noise.get(name, 0.0) + noise
        self.updates += 1


def train(rows: list[dict[str, Any]], assistant_only: bool) -> dict[str, Any]:
    """Losses, gradient norms and some of the weights of two updates, each in two micro-batches."""
    tokenizer, noise = make_tokenizer(), Noise()
    if assistant_only:
        tokenizer.chat_template = MARKED
    with TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, packing=False, report_to="none", save_strategy="no",
            per_device_train_batch_size=ROWS_PER_STEP // 2, gradient_accumulation_steps=2, max_steps=len(rows) // ROWS_PER_STEP,
            train_sampling_strategy="sequential", learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.0, adam_beta1=0.9,
            adam_beta2=0.999, adam_epsilon=1e-8, max_grad_norm=0.5, logging_steps=1, assistant_only_loss=assistant_only,
        )  # fmt: skip
        trainer = SFTTrainer(
            tiny_model(), arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[noise]
        )
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    picked = {name: parameter.detach().flatten()[::EVERY].tolist() for name, parameter in trainer.model.named_parameters()}
    return {
        "steps": [{"loss": entry["loss"], "grad_norm": entry["grad_norm"]} for entry in steps],
        "weights": picked,
        "noise": {name: [float(f"{x:.3g}") for x in noise.noise[name].flatten()[::EVERY].tolist()] for name in picked},
    }


def main() -> None:
    found = {"trl": trl.__version__, "every": EVERY, "rows_per_step": ROWS_PER_STEP}
    found["cases"] = {name: {"rows": rows} | train(rows, name == "messages") for name, rows in ROWS.items()}
    (Path(__file__).parent / "sft_trl.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
