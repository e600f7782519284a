"""Engine: a model that is loaded and generates, without a trainer."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.errors import ConfigError
from lockstep.generation import Engine
from lockstep.models.source import model_folder

MODEL = "smollm2-135m"
PROMPTS = ["1, 2, 3,", "The sky is", "The capital of France is"]
PAGE = Path(__file__).parents[2] / "docs" / "generation.md"


@pytest.fixture(scope="module")
def engine():
    with Engine(MODEL, device="cpu", dtype="float32", max_num_seqs=2) as made:
        yield made


def test_greedy_tokens_are_those_of_transformers_and_log_probs_those_of_its_logits(engine: Engine) -> None:
    folder = model_folder(MODEL)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for answer in engine.generate(PROMPTS, max_tokens=8, temperature=0.0, stop_token_ids=()):
        prompt = torch.tensor([answer.prompt_ids])
        expected = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        assert answer.ids == expected[0, len(answer.prompt_ids) :].tolist()
        logits = reference(expected).logits[0, len(answer.prompt_ids) - 1 : -1].log_softmax(-1)
        own = logits.gather(-1, torch.tensor(answer.ids)[:, None]).squeeze(-1)
        assert answer.log_probs == pytest.approx(own.tolist(), abs=1e-3)
        assert answer.text == engine.tokenizer.decode(answer.ids, skip_special_tokens=True)
        assert (answer.finish_reason, answer.error) == ("length", None)


def test_ids_and_texts_are_the_same_prompt_and_a_seed_is_repeated(engine: Engine) -> None:
    ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    texts = engine.generate(PROMPTS, max_tokens=6, seed=3)
    assert engine.generate(ids, max_tokens=6, seed=3) == texts
    assert engine.generate(PROMPTS, max_tokens=6, seed=4) != texts


def test_a_stop_string_ends_a_response(engine: Engine) -> None:
    [answer] = engine.generate(["1, 2, 3,"], max_tokens=20, temperature=0.0, stop=["5"])
    assert answer.finish_reason == "stop"
    assert answer.text.endswith("5")


def test_a_prompt_that_is_too_long_has_an_error_and_the_others_an_answer(engine: Engine) -> None:
    long, short = engine.generate([[1] * 10_000, "The sky is"], max_tokens=2)
    assert long.finish_reason == "error"
    assert long.error is not None
    assert (long.ids, short.error) == ([], None)


def test_a_parameter_out_of_range_is_named(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        engine.generate(["a"], temperature=-1.0)


def test_the_example_of_the_docs_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text()
    start = text.index("from lockstep.generation import Engine")
    example = tmp_path / "example.py"
    example.write_text(text[start : text.index("```", start)])
    runpy.run_path(str(example))
    assert len(capsys.readouterr().out.splitlines()) == 2
