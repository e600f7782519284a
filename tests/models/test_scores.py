from pathlib import Path

import pytest
import torch
from helpers.families import FAMILIES
from helpers.tiny import save_tiny_model
from torch import nn
from transformers import AutoModelForSequenceClassification

from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError
from lockstep.models.load import Head, load_model
from lockstep.models.mixin import replace_class
from lockstep.models.packing import pack_sequences
from lockstep.models.scores import ScoreLayer
from lockstep.protocol import Ragged


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi", "gpt_neox", "gpt2", "mixtral"]
)
def test_scores_of_packed_rows_are_those_of_transformers_padded_block(model_type: str, tmp_path: Path) -> None:
    """A row that ends with the padding token too, which transformers does not read."""
    path = save_tiny_model(tmp_path, model_type, score_head=True, **FAMILIES[model_type])
    rows = Ragged.from_rows([[5, 6, 7, 8, 9, 10, 11], [3], [4, 9, 0], [12, 0, 13, 14]])
    packed = pack_sequences(rows, 0, torch.device("cpu"))
    block, mask = rows.pad(0), rows.like(torch.ones_like(rows.values)).pad(0)
    # The fused attention of transformers 5.17 leaves out gemma2's soft cap.
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager")
    with torch.no_grad():
        scores = load_model(ModelConfig(path=path), Head.SCORE, seed=0, pad_token_id=0).eval()(
            **packed.inputs, read_at=packed.predict_at
        )
        expected = model(input_ids=block, attention_mask=mask).logits[:, 0]
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.01


def test_a_head_that_is_no_linear_layer_named_score_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "roberta", score_head=True, is_decoder=True)
    with pytest.raises(ConfigError, match="RobertaForSequenceClassification has no linear layer named score"):
        load_model(ModelConfig(path=path), Head.SCORE, seed=0)


def test_the_score_layer_computes_in_float32() -> None:
    layer = nn.Linear(64, 1, bias=False).bfloat16()
    hidden = torch.randn(8, 64, dtype=torch.bfloat16)
    expected = hidden.double() @ layer.weight.double().t()
    replace_class(layer, ScoreLayer)
    torch.testing.assert_close(layer(hidden).double(), expected, atol=1e-6, rtol=0)
