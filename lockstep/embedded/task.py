"""Write a word backwards: a tiny tokenizer, a tiny model with a short supervised warm-up, and prompts in parquet files.

Everything is an ordinary file of the kind a user would bring (a Hugging Face folder, two parquet files), so the run that follows takes
no shortcut. The examples of the warm-up are careless: three in five copy the word instead of reversing it. So the model has both
behaviours, the wrong one more often, and the reward has to sort them out.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lockstep.config.trainer import RunConfig
from lockstep.observability.display import Display
from lockstep.trainer.run.loop import Run
from lockstep.utils.quiet import quiet_transformers

DATA_SOURCE = "lockstep/reverse"
LETTERS = "abcdefghij"
_PAD = "<pad>"
_EOS = "<eos>"
_USER = "<user>"
_ASSISTANT = "<assistant>"
_SHORTEST = 3
_LONGEST = 6
_NUM_TRAIN = 2048
_NUM_VAL = 256
_BATCH = 64
_MAX_WARMUP_STEPS = 2000
_CHECK_EVERY = 10
_CARELESS = 0.6
"""Share of warm-up examples that copy the word."""
_IGNORE = -100  # torch's cross entropy skips these targets


@dataclass(frozen=True)
class EmbeddedTask:
    """Where the files are, and how good the model was when the warm-up stopped."""

    model: Path
    """Model and tokenizer, a Hugging Face folder."""
    train_file: Path
    val_file: Path
    warmup_steps: int
    warmup_accuracy: float
    """Probability that the model, sampled, writes a validation word backwards without a mistake; the mean over the words."""


def prepare(directory: Path, seed: int, target_accuracy: float = 0.3) -> EmbeddedTask:
    """Make the files in `directory`. The warm-up ends when a check finds `target_accuracy` on the validation words."""
    directory.mkdir(parents=True, exist_ok=True)
    train, val = _split(seed)
    with torch.random.fork_rng(devices=[]), _one_thread(), TemporaryDirectory() as run_dir:
        torch.manual_seed(seed)
        warm_up = _WarmUp(train, val, target_accuracy, random.Random(seed), run_dir)
        warm_up.fit()
    model_dir = directory / "model"
    with quiet_transformers():
        warm_up.model.save_pretrained(model_dir)
        warm_up.tokenizer.save_pretrained(model_dir)
    return EmbeddedTask(model_dir, *prepare_prompts(directory, seed), warm_up.global_steps, warm_up.accuracy)


def prepare_untrained(directory: Path, seed: int) -> tuple[Path, Path, Path]:
    """Make the files of `prepare` without the warm-up: the model, with weights that know nothing, and the files of prompts."""
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        tokenizer = make_tokenizer()
        LlamaForCausalLM(model_config(tokenizer)).save_pretrained(directory / "model")
        tokenizer.save_pretrained(directory / "model")
    return directory / "model", *prepare_prompts(directory, seed)


def widen_context(model: Path, longest: int) -> None:
    """Make the model in the folder hold sequences of `longest` tokens: its weights do not depend on the length."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    if config["max_position_embeddings"] < longest:
        path.write_text(json.dumps(config | {"max_position_embeddings": longest}, indent=2) + "\n")


def prepare_prompts(directory: Path, seed: int) -> tuple[Path, Path]:
    """Make the files of prompts in `directory`, for training and for validation: all that a model of the user's needs."""
    directory.mkdir(parents=True, exist_ok=True)
    train, val = _split(seed)
    return write_prompts(directory, "train", train), write_prompts(directory, "val", val)


def _split(seed: int) -> tuple[list[str], list[str]]:
    """The words of training and of validation."""
    words = make_words(seed)
    return words[:_NUM_TRAIN], words[_NUM_TRAIN:]


@contextmanager
def _one_thread() -> Iterator[None]:
    """A model this small is slower on several threads (on busy cores: ten times), and its sums would depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter, and four special ones."""
    vocabulary = {token: i for i, token in enumerate((_PAD, _EOS, _USER, _ASSISTANT, *LETTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=_PAD, eos_token=_EOS, additional_special_tokens=[_USER, _ASSISTANT]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    return tokenizer


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )


def make_words(seed: int) -> list[str]:
    """Different words: training and validation share none."""
    rng = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < _NUM_TRAIN + _NUM_VAL:
        words["".join(rng.choices(LETTERS, k=rng.randint(_SHORTEST, _LONGEST)))] = None
    return list(words)


def write_prompts(directory: Path, split: str, words: list[str]) -> Path:
    """Write {split}.parquet; returns where it is."""
    path = directory / f"{split}.parquet"
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": word}],
            "ability": "copying",
            "reward_model": {"style": "rule", "ground_truth": word[::-1]},
            "extra_info": {"split": split, "index": i},
        }
        for i, word in enumerate(words)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@dataclass(frozen=True)
class _WarmUpConfig:
    trainer: RunConfig


class _WarmUp(Run):
    """Supervised steps until the right answers of `val` have the probability `target_accuracy`."""

    def __init__(self, train: list[str], val: list[str], target_accuracy: float, rng: random.Random, run_dir: str) -> None:
        trainer = RunConfig(default_local_dir=run_dir, val_before_train=False, test_freq=_CHECK_EVERY, save_freq=0)
        super().__init__(_WarmUpConfig(trainer), _MAX_WARMUP_STEPS, Display(), has_validation=True)
        self.tokenizer = make_tokenizer()
        self.model = LlamaForCausalLM(model_config(self.tokenizer))
        self.accuracy = 0.0
        self._words = train
        self._target_accuracy = target_accuracy
        self._rng = rng
        self._val = _examples(self.tokenizer, val, [word[::-1] for word in val])
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def _step(self) -> dict[str, float]:
        words = self._rng.sample(self._words, _BATCH)
        answers = [word if self._rng.random() < _CARELESS else word[::-1] for word in words]
        log_probs = _token_log_probs(self.model, *_examples(self.tokenizer, words, answers))
        loss = -log_probs.sum() / (log_probs != 0).sum()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"loss": loss.item()}

    def _validate(self) -> dict[str, float]:
        """The probability of the right answers. When it is high enough this step is the last."""
        with torch.no_grad():
            self.accuracy = _token_log_probs(self.model, *self._val).sum(1).exp().mean().item()
        if self.accuracy >= self._target_accuracy:
            self.total_steps = self.global_steps
        elif self.global_steps == self.total_steps:
            raise RuntimeError(
                f"the warm-up reached only {self.accuracy:.2f} of {self._target_accuracy} after {self.total_steps} steps"
            )
        return {"accuracy": self.accuracy}

    def _save(self, folder: Path) -> None:
        raise NotImplementedError("it is over in seconds: nothing is saved on the way")

    def _load(self, folder: Path, state: dict[str, Any]) -> None:
        raise NotImplementedError


def _examples(tokenizer: PreTrainedTokenizerFast, words: list[str], answers: list[str]) -> tuple[Tensor, Tensor]:
    """Prompt and answer padded on the right [words, L], and the same as targets where only the answer counts."""
    texts = [f"{_USER}{word}{_ASSISTANT}{answer}{_EOS}" for word, answer in zip(words, answers, strict=True)]
    encoded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, _IGNORE)
    for row, word in enumerate(words):
        labels[row, : len(word) + 2] = _IGNORE
    return encoded["input_ids"], labels


def _token_log_probs(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """[words, L - 1]: log-prob of each answer token, 0 elsewhere."""
    logits = model(input_ids=ids).logits[:, :-1]
    return -torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=_IGNORE, reduction="none")
