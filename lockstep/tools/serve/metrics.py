"""Counts and times of a server, in Prometheus' text format."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper ends of the buckets of a histogram, in seconds."""


@dataclass(slots=True)
class Histogram:
    """How many times were at most so long."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    total: float = 0.0

    def add(self, value: float) -> None:
        """One time more, in seconds."""
        self.counts[next((i for i, bound in enumerate(_BOUNDS) if value <= bound), len(_BOUNDS))] += 1
        self.total += value

    def lines(self, name: str) -> Iterator[str]:
        """As Prometheus reads it."""
        so_far = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self.counts, strict=True):
            so_far += count
            yield f'{name}_bucket{{le="{bound}"}} {so_far}'
        yield f"{name}_sum {self.total}"
        yield f"{name}_count {so_far}"


@dataclass(slots=True)
class Metrics:
    """What a server has done since it started."""

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(path, HTTP status) -> responses. 499: the client went away before there was one."""
    finished: Counter[str] = field(default_factory=Counter)
    """Finish reason -> answers of the engine."""
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_s: Histogram = field(default_factory=Histogram)
    """From a request's arrival to its first token, of streams."""
    request_s: Histogram = field(default_factory=Histogram)
    """From a request's arrival to its last token."""

    def text(self, gauges: Mapping[str, float]) -> str:
        """All of it, and `gauges`: name -> what is the case now."""
        return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: Mapping[str, float]) -> Iterator[str]:
        yield "# TYPE lockstep_http_responses_total counter"
        for (path, status), count in sorted(self.responses.items()):
            yield f'lockstep_http_responses_total{{path="{path}",status="{status}"}} {count}'
        yield "# TYPE lockstep_answers_total counter"
        for reason, count in sorted(self.finished.items()):
            yield f'lockstep_answers_total{{finish_reason="{reason}"}} {count}'
        for name, value in (("prompt", self.num_prompt_tokens), ("generated", self.num_generated_tokens)):
            yield f"# TYPE lockstep_{name}_tokens_total counter"
            yield f"lockstep_{name}_tokens_total {value}"
        for name, histogram in (("time_to_first_token", self.first_token_s), ("request", self.request_s)):
            yield f"# TYPE lockstep_{name}_seconds histogram"
            yield from histogram.lines(f"lockstep_{name}_seconds")
        for name, gauge in gauges.items():
            yield f"# TYPE lockstep_{name} gauge"
            yield f"lockstep_{name} {gauge:g}"
