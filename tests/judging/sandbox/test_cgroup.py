"""Control groups without a kernel; what they do in one is in test_attacks.py."""

import pytest

from lockstep.judging.sandbox.cgroup import Group, Groups, find_groups


@pytest.mark.parametrize(
    ("text", "is_over"),
    [("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", False), ("low 0\noom 3\noom_kill 12\n", True), (None, False)],
)
def test_a_group_is_over_when_the_kernel_ended_a_process_of_it(tmp_path, text, is_over):
    if text is not None:
        (tmp_path / "events").write_text(text)
    assert Group(tmp_path, "events").is_over() is is_over


def test_a_limit_that_cannot_be_set_leaves_no_group(tmp_path):
    with pytest.raises(OSError, match="x/y"):
        Groups(tmp_path, {"x/y": "{limit}"}, "events").make(1)
    assert not list(tmp_path.iterdir())


def test_what_is_found_can_be_made_and_removed():
    groups = find_groups()
    if groups is None:
        pytest.skip("this machine lets us make no control groups")
    group = groups.make(1 << 27)
    assert str(1 << 27) in (group.folder / next(iter(groups.settings))).read_text()
    group.close()
    group.close()
    assert not group.folder.exists()
