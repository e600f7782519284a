"""What torchtitan needs before it is imported, and that nobody else is given more than that."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch
import torch.distributed.fsdp

pytest.importorskip("torchtitan")
from lockstep.backends.torchtitan.compat import prepare_import

EXPERTS = "torchtitan.distributed.minimal_async_ep"


def test_a_torch_without_the_newest_name_is_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed.fsdp, "DataParallelMeshDims", raising=False)
    prepare_import(torch.device("cpu"))
    assert isinstance(torch.distributed.fsdp.DataParallelMeshDims, type)


def test_meshes_are_those_of_the_device() -> None:
    prepare_import(torch.device("cpu"))
    from torchtitan.distributed import parallel_dims

    assert parallel_dims.device_type == "cpu"


@pytest.mark.skipif(find_spec("triton") is not None, reason="triton is installed, so nothing stands in for it")
def test_what_needs_triton_says_so_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, EXPERTS, raising=False)
    prepare_import(torch.device("cpu"))
    with pytest.raises(ImportError, match="needs triton, which is not installed"):
        sys.modules[EXPERTS].dispatch_op()
