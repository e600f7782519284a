"""Keep transformers from writing progress bars and reports over the display."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, transformers shows neither progress bars nor messages below an error; the caller checks what it reports."""
    verbosity = logging.get_verbosity()
    had_progress_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bars:
            logging.enable_progress_bar()
