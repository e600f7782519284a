"""Runner: computes passes on one device. The generation loop decides what; a runner knows how."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from torch import Tensor

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.native.layout import StepBatch


class Runner(ABC):
    """Keys and values of `num_pages` pages, and the model that fills and reads them."""

    page_size: int
    """Tokens a page."""
    lookahead: int = 1
    """Most tokens that a decoding pass draws for each row."""
    mixed: bool = True
    """Whether a pass may hold prompts and decoding rows together."""
    most_tokens: int | None = None
    """Tokens of a pass above which it only loses speed; None if there is no such number."""
    num_pages: int = 0
    """Pages that there is memory for now; 0 while asleep."""

    @abstractmethod
    def ready(self) -> AbstractContextManager[None]:
        """Inside, passes are computed with the weights that the module had at the start, laid out for it. For one generation."""

    @abstractmethod
    def most_pages(self) -> int:
        """How many pages the free memory of the device has room for now."""

    @abstractmethod
    def open(self, num_pages: int) -> None:
        """Take memory for that many pages; what was stored before is lost."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""

    @abstractmethod
    def copy_pages(self, copies: dict[int, int]) -> None:
        """Copy pages, all at once: target -> source."""

    @abstractmethod
    def step(self, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        """Compute a pass and draw: tokens [k, S] int64 and log-probs [k, S] float32, on the CPU.

        k is `batch.num_steps` or less. What is drawn after a row's end means nothing, but must not be stored outside the row's pages:
        places beyond them go to the scratch page. A log-prob that is not finite says that the logits are not.
        """
