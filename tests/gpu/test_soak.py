"""The soak's driver, with both engines on the CPU; on a GPU it is a command (gpu/soak.py)."""

import pytest
import torch
from gpu import soak

from lockstep.workers.rollout.base import Completion


def test_five_cases_on_the_cpu_are_equal() -> None:
    total, wrong = soak.soak(count=5, seconds=300.0, device="cpu")
    assert (total["cases"], total["wrong"], wrong) == (5, 0, [])
    assert total["equal"] > 5


def test_the_time_limit_ends_it() -> None:
    assert soak.soak(count=5, seconds=-1.0, device="cpu")[0]["cases"] == 0


@pytest.mark.parametrize("change", ["token", "log_prob", "reason"])
def test_another_token_log_prob_or_reason_is_wrong(change: str) -> None:
    case = soak.draw_case(3)
    engine = soak.make_engine(soak.Plain, case.family, (16, 512, False), "cpu")
    plain = engine.generate(case.requests, case.params)
    assert soak.compare(case, plain, plain, engine) == {"equal": len(plain)}
    place = next(i for i, completion in enumerate(plain) if len(completion.ids) > 1)
    old = plain[place]
    ids, log_probs, reason = old.ids.clone(), old.log_probs.clone(), old.finish_reason
    if change == "token":
        others = [t for t in range(32) if t not in soak._neighbours(case, case.requests[place], ids[:1].tolist(), engine)]
        ids[1] = others[0]
    log_probs[0] += 0.01 if change == "log_prob" else 0.0
    changed = Completion(old.index, ids, log_probs, "abort" if change == "reason" else reason, old.policy_version)
    found = [*plain[:place], changed, *plain[place + 1 :]]
    assert soak.compare(case, found, plain, engine)["wrong"] == 1
    assert torch.isfinite(log_probs).all()
