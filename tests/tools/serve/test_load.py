"""A small crowd of the load test. The whole one: `PYTHONPATH=.:tests python tests/tools/serve/load.py`."""

from __future__ import annotations

import asyncio
import os

from helpers.serving import load_served, save_served_model, serving
from tools.serve import load as crowds


def test_a_crowd_that_misbehaves_gets_right_answers_and_leaves_nothing_behind(tmp_path):
    folder = save_served_model(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    limits = {"max_queue": 16, "max_body_bytes": crowds.MAX_BODY, "timeout_s": crowds.HANG_S}
    with serving(load_served(folder, max_num_seqs=8), **limits) as client:
        crowd, metrics = asyncio.run(crowds.load(client.port, folder, count=120, at_once=24))
        assert crowd.wrong == []
        assert sum(count for outcome, count in crowd.outcomes.items() if ": " in outcome) == 120
        assert not crowds.pages_lost(metrics)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # what torch keeps open
