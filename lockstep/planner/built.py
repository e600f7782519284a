"""Models without weights, for counting: built from their configs on the meta device."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedModel

from lockstep.config.engine import ModelConfig
from lockstep.errors import DataError
from lockstep.models.load import Head, outline

_kept: ContextVar[dict[Any, PreTrainedModel] | None] = ContextVar("kept", default=None)


def build(model: ModelConfig, head: Head) -> PreTrainedModel:
    """The model of `model.path` with this head; one that is to get adapters is the caller's own.

    Raises DataError where transformers cannot build it.
    """
    kept = _kept.get()
    key = (model.path, model.trust_remote_code, repr(model.override_config), head)
    if kept is not None and key in kept and not model.adapts:
        return kept[key]
    try:
        built = outline(model, head)
    except ValueError as error:
        first = str(error).strip().splitlines()[0]
        raise DataError(f"{model.path} cannot be built as {head.name.lower()}: {first}") from error
    if kept is not None and not model.adapts:
        kept[key] = built
    return built


@contextmanager
def reusing_models() -> Iterator[None]:
    """Within it each model is built once: for who asks about many configurations of the same models."""
    token = _kept.set({} if (kept := _kept.get()) is None else kept)
    try:
        yield
    finally:
        _kept.reset(token)
