"""How tokens are drawn: what the trainer asks of the generation engines."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One set of sampling parameters for a whole call."""

    temperature: float
    """Divides the logits; 0 takes the most likely token."""
    top_k: int
    """Keep the k most likely tokens; -1 keeps all."""
    top_p: float
    """Keep the most likely tokens that hold this much probability; 1 keeps all."""
    max_tokens: int
    """Longest response."""
    stop_token_ids: tuple[int, ...]
    """A response ends after one of these."""
    seed: int
    """The run's seed."""
