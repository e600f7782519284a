from helpers.tiny import tiny_config

from lockstep.config.engine import ModelConfig
from lockstep.models.load import Head
from lockstep.planner.built import build


def test_experts_larger_than_the_memory_here_are_counted(tmp_path):
    """Weights of 1 TiB in one parameter: no machine that tests gives a process that much, not even for a moment."""
    tiny_config("mixtral", hidden_size=2**14, intermediate_size=2**17, num_local_experts=64, num_hidden_layers=1).save_pretrained(
        tmp_path
    )
    built = build(ModelConfig(path=str(tmp_path)), Head.LANGUAGE_MODEL)
    assert max(parameter.nbytes for parameter in built.parameters()) == 2**40
