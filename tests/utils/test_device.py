import pytest
import torch

from lockstep.errors import ResourceError
from lockstep.utils.device import resolve_device


@pytest.mark.parametrize(
    ("name", "has_gpu", "expected"), [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")]
)
def test_auto_takes_a_gpu_where_there_is_one(monkeypatch, name, has_gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert resolve_device(name) == expected


def test_asking_for_a_gpu_that_is_not_there_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match=r"trainer\.device=cuda, but torch .* sees no GPU.*trainer\.device=cpu"):
        resolve_device("cuda")
