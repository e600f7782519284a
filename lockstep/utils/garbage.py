"""Short and rare garbage collections: full ones walk over every object, which are 400,000 once torch and transformers are imported.

One such pause is 0.15 to 0.3 s, in the middle of an update. What is there before the first step stays until the last one, so it need not
be looked at: it is frozen. Where many lists grow that stay, as in a batch of episodes, even the small collections walk over all their
numbers again and again: there they are made rare.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_BETWEEN = 20_000
"""Objects that are made between two collections where they are rare."""
_is_frozen = False  # gc.get_freeze_count() says it too, but counts them all


def freeze_objects() -> None:
    """Leave every object that is there now, but not the garbage among them, out of later collections."""
    global _is_frozen
    gc.collect()
    gc.freeze()
    _is_frozen = True


def unfreeze_objects() -> None:
    """Have all objects collected again, whoever froze them."""
    global _is_frozen
    gc.unfreeze()
    _is_frozen = False


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Inside, what was there before is left out of collections; afterwards it is collected again, so that a process may do many runs.

    Does nothing where objects are frozen already, by such a block around this one or by the program: whoever froze them ends it.
    """
    if _is_frozen or gc.get_freeze_count():
        yield
        return
    freeze_objects()
    try:
        yield
    finally:
        unfreeze_objects()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Inside, collections come only after many more objects than usual."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _BETWEEN) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
