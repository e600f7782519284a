"""A few rows of tests/eval/parity.py: lm-eval on `lockstep serve` says what it says on transformers."""

from __future__ import annotations

import pytest
from eval.parity import DATA, is_equal, parse, run

pytest.importorskip("lm_eval")


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the rows of HellaSwag and GSM8K are read from {DATA}")
def test_lm_eval_on_serve_is_lm_eval_on_transformers():
    result = run(parse(["--hellaswag", "4", "--gsm8k", "2", "--max-tokens", "32"]))
    assert is_equal(result["differences"]), result["differences"]
    scores = ("acc,none", "acc_norm,none")
    assert [result["serve"]["local_hellaswag"][name] for name in scores] == [
        result["hf"]["local_hellaswag"][name] for name in scores
    ]
