"""Backend: what the native engine asks of a device. CPU and GPU implement it; the scheduler, the pages and the requests are common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, nullcontext

from lockstep.config.sampling import SamplingParams
from lockstep.generation.scheduler import Sample, Scheduler

TakeAborts = Callable[[], Set[int]]
"""Asked before each pass (GPU: interval) for the indices of the samples to end now."""
Event = tuple[Sample, str | None]
"""A sample and why it ended: stop, length, abort or error. None: it goes on, and has more tokens (only with `Sample.streams`)."""


class Backend(ABC):
    """A model on one device, and the memory of `num_pages` pages for its keys and values.

    `run` is called again when samples were added after it had ended: pages and what they hold stay until `open` or `close`.
    """

    page_size: int
    """Tokens per page."""
    lookahead: int = 1
    """Most tokens that are drawn for each row before the host looks."""
    mixed: bool = True
    """Whether a pass may hold prompts and decoding rows together."""
    most_tokens: int | None = None
    """Tokens of a pass above which it only loses speed; None if there is no such number."""
    in_one_shape: bool = False
    """See Scheduler.in_one_shape."""
    num_pages: int = 0
    """Pages that there is memory for now, the scratch page among them; 0 while closed."""

    @abstractmethod
    def most_pages(self) -> int:
        """How many pages the free memory of the device has room for now."""

    @abstractmethod
    def open(self, num_pages: int) -> None:
        """Take memory for that many pages; what was stored before is lost."""

    @abstractmethod
    def close(self) -> None:
        """Give all memory back to the device."""

    def ready(self) -> AbstractContextManager[None]:
        """Inside, passes are computed with the weights that the module had at the start, laid out for it. `run` needs it."""
        return nullcontext()

    @abstractmethod
    def run(self, scheduler: Scheduler, sampling: SamplingParams, take_aborts: TakeAborts = set) -> Iterator[list[Event]]:
        """What came of each pass, until the scheduler is idle or stale. Samples may be added to it in between.

        `sampling` is for samples without parameters of their own. An error is a log-prob that is not finite, the sample's last one.
        Closing the iterator ends the generation; the scheduler must not be used after that.
        """
