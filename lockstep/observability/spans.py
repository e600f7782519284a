"""How long each stage of a training step takes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StageTimer:
    """Wall time by stage name, for one training step at a time.

    `on_enter` is called with the name whenever a stage begins, e.g. `Display.stage`.

    ```python
    timer.reset()
    with timer.stage("step"):
        with timer.stage("gen"):
            ...
    metrics |= {f"timing_s/{name}": seconds for name, seconds in timer.seconds.items()}
    ```
    """

    def __init__(self, on_enter: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        """Finished time by stage, in the order in which the stages first ended."""
        self._on_enter = on_enter
        self._open: set[str] = set()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `seconds[name]`, also when the body raises.

        Stages of different names may be nested; the outer one's time contains the inner one's. Raises RuntimeError when
        `name` is already open, since its time would be counted twice.
        """
        if name in self._open:
            raise RuntimeError(f"stage {name!r} is already open and would be counted twice: name the inner one differently")
        if self._on_enter is not None:
            self._on_enter(name)
        self._open.add(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self._open.remove(name)

    def reset(self) -> None:
        """Forget the finished times. A stage that is still open is counted from where it began."""
        self.seconds = {}
