"""Groups of ranks that hold a copy each, and weights that are written and read by parts."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers import engine_properties as properties
from helpers.distributed import run_distributed
from helpers.engine_properties import TIED, Layout
from helpers.engines import make_tiny_engine
from helpers.tiny import save_tiny_model
from torch.distributed.fsdp import FullyShardedDataParallel

from lockstep.workers.engine.fsdp import sharding


def test_two_copies_of_two_shards_learn_as_one_and_continue_on_one_rank(tmp_path: Path) -> None:
    path, copies = save_tiny_model(tmp_path / "model", **TIED), Layout("fsdp", 4, {"fsdp_size": 2})
    properties.assert_a_checkpoint_continues([copies, Layout("fsdp"), copies], tmp_path, path)


def test_hybrid_shards_may_keep_gathered_layers(tmp_path: Path) -> None:
    layout = Layout("fsdp", 4, {"fsdp_size": 2, "reshard_after_forward": False})
    properties.assert_updates_equal_plain_pytorch(layout, save_tiny_model(tmp_path))


def test_fsdp1_gathers_one_layer_at_a_time(tmp_path: Path) -> None:
    """While a weight is handed out, no other layer than its own is whole."""
    path = save_tiny_model(tmp_path)

    def watch() -> int:
        engine = make_tiny_engine(path, "fsdp")
        units = [unit for unit in engine.module.modules() if isinstance(unit, FullyShardedDataParallel)]
        largest = 0
        for _name, tensor in sharding.whole_tensors(engine.module):
            assert torch.isfinite(tensor).all()
            whole = [
                unit for unit in units if unit._handle is not None and unit._handle.is_sharded(unit._handle.flat_param) is False
            ]
            largest = max(largest, len(whole))
        assert len(units) == 3
        return largest

    assert run_distributed(watch, 2) == [1, 1]
