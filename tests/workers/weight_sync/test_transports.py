"""Every way that weights go between processes, for real: the sender is one process, the receivers are others."""

import errno
import fcntl
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.distributed import run_distributed
from helpers.rollouts import ids_of, make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.errors import WeightSyncError
from lockstep.workers.rollout.base import ModuleRollout
from lockstep.workers.weight_sync.base import WeightSender, describe, received
from lockstep.workers.weight_sync.broadcast import BroadcastSender
from lockstep.workers.weight_sync.disk import WEIGHTS, DiskSender
from lockstep.workers.weight_sync.ipc import CudaOffer, IPCSender
from lockstep.workers.weight_sync.source import SentWeights, make_sender

CPU = torch.device("cpu")
METHODS = ("ipc", "broadcast", "disk")


def odd_tensors() -> dict[str, Tensor]:
    """All kinds of shapes, types and strides."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(33, 7, generator=generator)
    return {
        "matrix": matrix,
        "transposed": matrix.t(),
        "half": matrix.bfloat16()[1:],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "counts": torch.arange(9),
    }


@pytest.mark.parametrize("method", METHODS)
def test_every_tensor_has_the_same_checksum_on_both_sides(tmp_path: Path, method: str) -> None:
    """One sender, two receivers: values, types, shapes and checksums of what was sent and what arrived."""

    def exchange() -> object:
        rank, box = dist.get_rank(), [None]
        if rank == 0:
            sender = make_sender(method, RolloutConfig(weight_sync_dir=str(tmp_path)), 5, 2, CPU)
            sent = None if method == "broadcast" else sender.send(odd_tensors().items())
            box = [sender.offer()]
        dist.broadcast_object_list(box)
        if rank == 0:
            sent = sent or sender.send(odd_tensors().items())
            dist.barrier()
            sender.close()
            sender.close()
            return sent, os.listdir(tmp_path)
        assert box[0].version == 5
        weights = received(box[0], CPU, rank - 1)
        tensors = {name: tensor.clone() for name, tensor in weights}
        dist.barrier()
        return weights.manifest, tensors

    (sent, left_behind), *receivers = run_distributed(exchange, 3)
    expected = odd_tensors()
    assert sent == {name: describe(tensor) for name, tensor in expected.items()}
    assert left_behind == []
    for manifest, tensors in receivers:
        assert manifest == sent
        for name, tensor in expected.items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name], tensor)


def engine(folder: Path) -> ModuleRollout:
    return make_rollout(save_tiny_model(folder))


def greedy(rollout: ModuleRollout) -> list[list[int]]:
    return ids_of(rollout.generate(make_requests(), sampling(temperature=0.0)))


def good_sender(method: str, folder: Path, version: int = 1) -> WeightSender:
    return IPCSender(version) if method == "ipc" else DiskSender(version, str(folder))


@pytest.mark.parametrize("method", ["ipc", "disk"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_engine_generates_what_the_sent_model_does(tmp_path: Path, method: str, tied: bool) -> None:
    path = save_tiny_model(tmp_path / "a", tie_word_embeddings=tied)
    source = tiny_model(seed=3, tie_word_embeddings=tied)
    rollout, expected = make_rollout(path), make_rollout(save_tiny_model(tmp_path / "b", seed=3, tie_word_embeddings=tied))
    assert greedy(rollout) != greedy(expected)
    with good_sender(method, tmp_path, 4) as sender:
        sent = sender.send(source.named_parameters())
        assert rollout.receive(sender.offer(), CPU) == sent
    assert greedy(rollout) == greedy(expected)
    assert rollout.version == 4


def flip_a_byte(sender: WeightSender) -> None:
    offer = sender.offer()
    if isinstance(sender, IPCSender):
        descriptor = os.open(offer.path, os.O_RDWR)
        os.pwrite(descriptor, bytes([os.pread(descriptor, 1, 1000)[0] ^ 1]), 1000)
        os.close(descriptor)
        return
    tensors = load_file(Path(offer.folder) / WEIGHTS)
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, Path(offer.folder) / WEIGHTS)


def cut_short(sender: WeightSender) -> None:
    offer = sender.offer()
    os.truncate(offer.path if isinstance(sender, IPCSender) else Path(offer.folder) / WEIGHTS, 2000)


def take_one_out(sender: WeightSender) -> None:
    offer = sender.offer()
    if isinstance(sender, DiskSender):
        tensors = load_file(Path(offer.folder) / WEIGHTS)
        save_file({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}, Path(offer.folder) / WEIGHTS)
    offer.manifest.pop("model.norm.weight", None)


@pytest.mark.parametrize("method", ["ipc", "disk"])
@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, take_one_out, lambda sender: sender.close()])
def test_after_a_sync_that_failed_nothing_is_generated_until_one_has_worked(tmp_path: Path, method: str, damage) -> None:
    rollout, source = engine(tmp_path / "model"), tiny_model(seed=3)
    before = greedy(rollout)
    with good_sender(method, tmp_path) as sender:
        sender.send(source.named_parameters())
        offer = sender.offer()
        damage(sender)
        with pytest.raises(WeightSyncError):
            rollout.receive(offer, CPU)
    with pytest.raises(WeightSyncError, match="no whole set of weights, so it does not generate: the update to version 1 failed"):
        greedy(rollout)
    assert rollout.version == 0
    with good_sender(method, tmp_path, 2) as sender:
        sender.send(source.named_parameters())
        rollout.receive(sender.offer(), CPU)
    assert greedy(rollout) != before
    assert rollout.version == 2


class LyingSender(BroadcastSender):
    """Announces the checksum of other values than it sends."""

    def send(self, weights):
        from lockstep.workers.weight_sync import broadcast

        original, broadcast.describe = broadcast.describe, lambda tensor: describe(tensor + (tensor.shape == (32,)))
        try:
            return super().send(weights)
        finally:
            broadcast.describe = original


def breaks_off(weights) -> Iterator[tuple[str, Tensor]]:
    for number, pair in enumerate(weights):
        if number == 4:
            raise KeyboardInterrupt
        yield pair


@pytest.mark.parametrize("failure", ["lie", "sender fails", "receiver is missing"])
def test_a_broadcast_that_fails_ends_on_both_sides_and_leaves_the_engine_without_weights(tmp_path: Path, failure: str) -> None:
    path = save_tiny_model(tmp_path)

    def exchange() -> str:
        rank, box, source = dist.get_rank(), [None], tiny_model(seed=3)
        if rank == 0:
            kind = LyingSender if failure == "lie" else BroadcastSender
            is_missing = failure == "receiver is missing"
            sender = kind(1, 2 if is_missing else 1, CPU, timeout_s=3.0 if is_missing else 60.0)
            box = [sender.offer()]
        dist.broadcast_object_list(box)
        if rank == 0:
            weights = source.named_parameters()
            try:
                sender.send(breaks_off(weights) if failure == "sender fails" else weights)
            except (WeightSyncError, KeyboardInterrupt) as error:
                del sender
                return type(error).__name__
            return "sent"
        rollout = make_rollout(path)
        with pytest.raises(WeightSyncError):
            rollout.receive(box[0], CPU)
        with pytest.raises(WeightSyncError, match="does not generate"):
            greedy(rollout)
        return "refused"

    sent, refused = run_distributed(exchange, 2, timeout_s=60)
    assert (
        sent == {"lie": "WeightSyncError", "sender fails": "KeyboardInterrupt", "receiver is missing": "WeightSyncError"}[failure]
    )
    assert refused == "refused"


def test_memory_that_is_gone_is_an_error_with_the_way_out() -> None:
    with IPCSender(3) as sender:
        sender.send(odd_tensors().items())
        offer = sender.offer()
    with pytest.raises(WeightSyncError, match=re.escape("weight_sync=broadcast or disk")):
        received(offer, CPU)


def refused(*arguments: object) -> Tensor:
    raise RuntimeError("CUDA error: invalid resource handle")


def test_gpu_memory_that_is_gone_is_an_error_with_the_way_out() -> None:
    offer = CudaOffer(3, {"a": describe(torch.ones(2))}, pickle.dumps({"a": (refused, ())}))
    with pytest.raises(WeightSyncError, match=r"GPU memory of version 3 .*invalid resource handle.*weight_sync=disk"):
        received(offer, CPU)


def test_a_folder_that_cannot_be_written_is_an_error_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightSyncError, match="weight_sync_dir"):
        DiskSender(1, str(tmp_path / "file")).send(odd_tensors().items())


def test_what_a_killed_sender_left_is_removed_by_the_next_one_and_nothing_else(tmp_path: Path) -> None:
    others = tmp_path / "lockstep-weights-another-machine-1-x"
    others.mkdir()
    killed, living = DiskSender(1, str(tmp_path)), DiskSender(2, str(tmp_path))
    killed.send(odd_tensors().items())
    assert killed._lock is not None
    os.close(killed._lock)  # as the end of its process does
    folders = set(tmp_path.iterdir())
    with living:
        living.send(odd_tensors().items())
        (kept,) = set(tmp_path.iterdir()) - folders
        with DiskSender(3, str(tmp_path)) as next_one:
            next_one.send(odd_tensors().items())
            assert {others, kept} < set(tmp_path.iterdir())
            assert len(set(tmp_path.iterdir())) == 3
            assert received(living.offer(), CPU).manifest is not None
    assert os.listdir(tmp_path) == [others.name]


def test_weights_are_written_where_nothing_can_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with DiskSender(1, str(tmp_path)) as first, DiskSender(2, str(tmp_path)) as second:
        for sender in (first, second):
            sender.send(odd_tensors().items())
        assert len(os.listdir(tmp_path)) == 2
    assert os.listdir(tmp_path) == []


def test_an_engine_in_another_process_is_sent_the_weights_only_when_they_have_changed(tmp_path: Path) -> None:
    rollout, source = engine(tmp_path), tiny_model(seed=3)
    size = sum(parameter.nbytes for parameter in source.parameters())
    borrowing = SentWeights(rollout, source.named_parameters, IPCSender, CPU)
    for change, copied, version in ((False, size, 0), (False, 0, 0), (True, size, 1), (False, 0, 1)):
        rollout.version += change
        with borrowing.borrowed() as found:
            assert (found, rollout.version) == (copied, version)
