import pytest

from lockstep.single_controller.base import Dispatch, Execute, register
from lockstep.single_controller.base.decorator import Registration, registered_methods


class Base:
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update(self) -> str:
        return "base"

    @register(blocking=False)
    def generate(self) -> None: ...

    def helper(self) -> None: ...


class Derived(Base):
    def update(self) -> str:
        return "derived"

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def generate(self) -> None: ...


def test_only_marked_methods_are_registered() -> None:
    assert registered_methods(Base) == {
        "generate": Registration(Dispatch.ALL_TO_ALL, blocking=False),
        "update": Registration(Dispatch.DP_COMPUTE_PROTO, blocking=True),
    }


def test_marking_leaves_the_method_as_it_was() -> None:
    assert Base().update() == "base"


def test_an_override_keeps_the_registration_unless_it_has_its_own() -> None:
    assert registered_methods(Derived) == {
        "generate": Registration(Dispatch.RANK_ZERO, blocking=True),
        "update": Registration(Dispatch.DP_COMPUTE_PROTO, blocking=True),
    }


@pytest.mark.parametrize("mode", [Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE_PROTO, "mine"])
def test_rank_zero_alone_is_refused_where_it_would_drop_arguments(mode: Dispatch | str) -> None:
    with pytest.raises(ValueError, match="would drop"):
        register(dispatch_mode=mode, execute_mode=Execute.RANK_ZERO)
