"""Weights between processes that use GPUs: CUDA handles and shared memory of the host on one of them, nccl between two."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from helpers.rollouts import ids_of, make_requests, sampling
from helpers.tiny import save_tiny_model, tiny_model

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from helpers.receivers import CUDA, gpu_rollout, receive, receive_and_generate, receive_sum

from lockstep.errors import WeightSyncError
from lockstep.workers.weight_sync.base import describe
from lockstep.workers.weight_sync.broadcast import BroadcastSender
from lockstep.workers.weight_sync.ipc import CudaOffer, IPCSender


@pytest.fixture(scope="module")
def other():
    """A process of its own, which has not seen this one's CUDA context."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def odd_tensors():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(33, 7, generator=generator).cuda()
    return {
        "matrix": matrix,
        "transposed": matrix.t(),
        "half": matrix.bfloat16()[1:],
        "scalar": torch.tensor(3.5).cuda(),
        "empty": torch.empty(0, 4).cuda(),
        "counts": torch.arange(9).cuda(),
    }


@pytest.mark.parametrize("cuda", [True, False], ids=["handles", "host memory"])
def test_every_tensor_has_the_same_checksum_on_both_sides(other, cuda):
    expected = odd_tensors()
    with IPCSender(5, cuda=cuda) as sender:
        sent = sender.send(expected.items())
        assert isinstance(sender.offer(), CudaOffer) == cuda
        received, values = other.submit(receive, sender.offer()).result(120)
    assert sent == received == {name: describe(tensor) for name, tensor in expected.items()}
    assert values == {name: tensor.float().tolist() for name, tensor in expected.items()}


@pytest.mark.parametrize("cuda", [True, False], ids=["handles", "host memory"])
def test_an_engine_in_another_process_generates_what_the_sent_model_does(tmp_path, other, cuda):
    path = save_tiny_model(tmp_path / "a")
    want = ids_of(gpu_rollout(save_tiny_model(tmp_path / "b", seed=3)).generate(make_requests(), sampling(temperature=0.0)))
    with IPCSender(4, cuda=cuda) as sender:
        sent = sender.send(tiny_model(seed=3).cuda().named_parameters())
        received, tokens = other.submit(receive_and_generate, path, sender.offer()).result(120)
    assert received == sent
    assert tokens == want


def test_handles_keep_no_memory_after_the_sync(other):
    before = torch.cuda.memory_allocated()
    for version in range(3):
        with IPCSender(version, cuda=True) as sender:
            sender.send([("weight", torch.full((1 << 24,), float(version), device="cuda"))])
            other.submit(receive_sum, sender.offer()).result(120)
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before


def test_nccl_sends_every_tensor():
    """A group of the sender alone: what one GPU can show of nccl's side."""
    with BroadcastSender(1, 0, CUDA, timeout_s=60.0) as sender:
        assert sender.send(odd_tensors().items()) == {name: describe(tensor) for name, tensor in odd_tensors().items()}


def test_two_members_of_a_broadcast_on_one_gpu_are_an_error_on_both_sides(tmp_path, other):
    """nccl refuses it; nobody waits without an end."""
    with BroadcastSender(1, 1, CUDA, timeout_s=60.0) as sender:
        receiving = other.submit(receive_and_generate, save_tiny_model(tmp_path), sender.offer())
        with pytest.raises(WeightSyncError, match="Duplicate GPU"):
            sender.send(tiny_model(seed=3).cuda().named_parameters())
        with pytest.raises(WeightSyncError, match="Duplicate GPU"):
            receiving.result(120)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_on_another_gpu_generates_what_was_broadcast(tmp_path, other):
    path = save_tiny_model(tmp_path / "a")
    want = ids_of(gpu_rollout(save_tiny_model(tmp_path / "b", seed=3)).generate(make_requests(), sampling(temperature=0.0)))
    other.submit(torch.cuda.set_device, 1).result(120)
    with BroadcastSender(1, 1, CUDA, timeout_s=60.0) as sender:
        receiving = other.submit(receive_and_generate, path, sender.offer())
        sent = sender.send(tiny_model(seed=3).cuda().named_parameters())
        received, tokens = receiving.result(120)
    assert received == sent
    assert tokens == want
