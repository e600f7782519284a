"""The embedded task: what `lockstep ppo` trains on when it is given nothing. It needs no download, no GPU, and a few minutes."""

from lockstep.embedded.task import EmbeddedTask, prepare, prepare_prompts, prepare_untrained, widen_context

__all__ = ["EmbeddedTask", "prepare", "prepare_prompts", "prepare_untrained", "widen_context"]
