import pytest
import torch

from lockstep.errors import ResourceError
from lockstep.models.packing import Budget
from lockstep.observability.metrics import values
from lockstep.workers.model_worker import MemoryWatch

CPU = torch.device("cpu")


def test_out_of_memory_names_the_stage_the_sizes_and_the_key() -> None:
    expected = r"stage update_actor \(2 rows of 12 tokens, the longest 9, up to 10 tokens at once\).*Lower a\.b first"
    with pytest.raises(ResourceError, match=expected), MemoryWatch(CPU).stage("update_actor", [3, 9], Budget(10), "a.b"):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(ResourceError, match="4 rows at once"), MemoryWatch(CPU).stage("x", [3], Budget(10, 4), "a.b"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_other_errors_pass_and_a_cpu_has_no_peaks() -> None:
    memory = MemoryWatch(CPU)
    with pytest.raises(RuntimeError, match="something else"), memory.stage("x", [], None, "a.b"):
        raise RuntimeError("something else")
    with memory.stage("x", [], None, "a.b"):
        pass
    assert memory.take_peaks() == {}


def test_the_workers_of_a_process_share_their_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference and a reward model return no metrics; who does takes theirs along, once, and the larger of two runs of a stage."""
    peaks = iter([3, 5, 2])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks) << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 8 << 30)
    device = torch.device("cuda", 0)
    actor, ref = MemoryWatch(device), MemoryWatch(device)
    for memory, name in ((ref, "ref"), (actor, "update_actor"), (actor, "update_actor")):
        with memory.stage(name, [], None, "a.b"):
            pass
    taken = values(actor.take_peaks())
    assert {name: peak for name, peak in taken.items() if "allocated" in name} == {
        "perf/max_memory_allocated_gb/ref": 3,
        "perf/max_memory_allocated_gb/update_actor": 5,
    }
    assert set(taken.values()) == {3, 5, 8}
    assert actor.take_peaks() == ref.take_peaks() == {}
