import gc
import weakref
from itertools import pairwise
from pathlib import Path

import torch
from helpers.rollouts import make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model

from lockstep.workers.rollout.native.cpu.kernels import Library
from lockstep.workers.rollout.native.cpu.memory import PackedMemory

MIB = 1 << 20


def test_tensors_lie_side_by_side_on_lines_of_the_cache_and_in_the_same_places_after_reuse(compiled: Library) -> None:
    memory = PackedMemory(compiled)
    shapes = [
        ((3, 5), torch.float32),
        ((7,), torch.bfloat16),
        ((40 * MIB,), torch.uint8),
        ((100 * MIB,), torch.uint8),
        ((9,), torch.float32),
    ]
    first = [memory.take(shape, dtype) for shape, dtype in shapes]
    for tensor, (shape, dtype) in zip(first, shapes, strict=True):
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.data_ptr() % 64 == 0
    ends = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in first)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    memory.reuse()
    assert [memory.take(shape, dtype).data_ptr() for shape, dtype in shapes] == [tensor.data_ptr() for tensor in first]


def test_the_memory_of_packed_weights_is_used_again_and_given_back_with_the_pages(tmp_path: Path, compiled: Library) -> None:
    rollout = make_rollout(save_tiny_model(tmp_path))
    places = []
    for _ in range(2):
        with rollout.backend.ready():
            places.append(rollout.backend._head.row(0)[0])
    assert places[0] == places[1]
    rollout.generate(make_requests(2), sampling(stop_token_ids=()))
    block = weakref.ref(rollout.backend._memory._blocks[0])
    rollout.sleep()
    gc.collect()
    assert block() is None
