"""A server over a scripted engine."""

from types import SimpleNamespace

import pytest
from helpers.serving import Script, byte_tokenizer, serving

from lockstep.tools.load_model import LoadedModel, ModelSource


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def serve(script):
    """`serve(options...)`: a server over the script, with two seats and no queue beside them."""
    engine = SimpleNamespace(vocabulary=258, context=256, seats=2, open=lambda sampling, num_tokens: script)
    loaded = LoadedModel(ModelSource("none"), byte_tokenizer(), engine, (256,))
    return lambda **options: serving(loaded, **{"max_queue": 0} | options)
