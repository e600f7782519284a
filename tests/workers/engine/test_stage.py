import pytest
import torch

from lockstep.errors import ResourceError
from lockstep.workers.engine.packing import Budget
from lockstep.workers.engine.stage import Stages

CPU = torch.device("cpu")


def test_out_of_memory_names_the_stage_the_sizes_and_the_key() -> None:
    expected = r"stage update_actor \(2 rows of 12 tokens, the longest 9, up to 10 tokens at once\).*Lower a\.b first"
    with pytest.raises(ResourceError, match=expected), Stages(CPU).run("update_actor", [3, 9], Budget(10), "a.b"):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(ResourceError, match="4 rows at once"), Stages(CPU).run("x", [3], Budget(10, 4), "a.b"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_other_errors_pass_and_a_cpu_has_no_peaks() -> None:
    stages = Stages(CPU)
    with pytest.raises(RuntimeError, match="something else"), stages.run("x", [], None, "a.b"):
        raise RuntimeError("something else")
    with stages.run("x", [], None, "a.b"):
        pass
    assert stages.take_peaks() == {}
