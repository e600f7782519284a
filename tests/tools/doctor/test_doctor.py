import re
from importlib import metadata

import pytest

from lockstep.tools.doctor import command, selftest
from lockstep.tools.doctor import parts as parts_module
from lockstep.tools.doctor.parts import Part, parts


@pytest.fixture
def quick(monkeypatch):
    """The command without the process of the self-test, and without programs."""
    monkeypatch.setattr(command, "_selftest", lambda timeout_s: iter([("generation", True, "fine"), ("training", True, "fine")]))
    monkeypatch.setattr(command, "_sandbox", lambda has_bwrap: iter([("sandbox", True, "fine")]))


def test_what_is_needed_is_what_the_package_asks_for():
    found = parts()
    assert {"torch", "transformers", "safetensors"} <= {part.name for part in found if part.is_needed and part.found}
    optional = {part.name: part for part in found if not part.is_needed}
    assert optional["ray"].remedy.startswith("pip install 'lockstep-rl[ray]'")
    assert optional["bubblewrap"].remedy.startswith("apt-get install bubblewrap")
    assert not {"pytest", "mypy"} & set(optional)


def test_a_source_tree_that_is_not_installed_is_checked_like_an_installed_package(monkeypatch, tmp_path):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    installed = {(part.name, part.found, part.is_needed) for part in parts()}
    monkeypatch.setattr(parts_module.metadata, "requires", requires)
    from_source = parts()
    assert {(part.name, part.found, part.is_needed) for part in from_source} == installed
    assert next(part for part in from_source if part.name == "ray").remedy.endswith(
        "[ray]' for several processes, GPUs or machines"
    )
    monkeypatch.setattr(parts_module, "_PYPROJECT", tmp_path / "pyproject.toml")
    assert [part.name for part in parts() if part.is_needed] == ["lockstep-rl"]


def test_all_is_well(quick, capsys):
    assert command.main([]) == 0
    text = capsys.readouterr().out
    assert re.search(r"ok +torch +\d", text)
    assert "all that a run needs is here and works" in text


def test_something_needed_that_is_missing_or_fails_is_a_status(quick, monkeypatch, capsys):
    missing = [Part("torch", None, "pip install 'torch>=2.11'", True), Part("ray", None, "pip install 'lockstep-rl[ray]'", False)]
    monkeypatch.setattr(command, "parts", lambda: missing)
    assert command.main([]) == 1
    text = capsys.readouterr().out
    assert "!! torch" in text
    assert "pip install 'torch>=2.11'" in text
    assert "1 of what is needed" in text
    monkeypatch.setattr(command, "parts", lambda: missing[1:])
    assert command.main([]) == 0
    monkeypatch.setattr(command, "_selftest", lambda timeout_s: iter([("training", False, "gradient norm nan")]))
    assert command.main([]) == 1


def test_a_self_test_that_hangs_or_dies_is_a_finding(monkeypatch):
    assert list(command._selftest(timeout_s=0.0)) == [("generation and training", False, "not done after 0 s")]
    monkeypatch.setattr(command.sys, "executable", "/bin/false")
    ((name, is_well, text),) = command._selftest(timeout_s=60.0)
    assert (name, is_well) == ("generation and training", False)
    assert "ended with status 1" in text


def test_the_self_test_generates_and_trains(tmp_path, capsys):
    metrics = selftest._step(tmp_path)
    assert metrics["training/rollout_log_probs_diff_max"] < selftest.DIFFERENCE["cpu"]
    assert metrics["actor/grad_norm"] > 0


def test_a_self_test_that_raises_says_what(monkeypatch, capsys):
    def fail(folder):
        raise RuntimeError("no kernels")

    monkeypatch.setattr(selftest, "_step", fail)
    selftest.main()
    assert '"is_well": false, "text": "RuntimeError: no kernels"' in capsys.readouterr().out


def test_the_sandbox_is_not_missed_where_it_cannot_be():
    assert next(command._sandbox(has_bwrap=False))[1] is True


def test_a_wrong_call_says_how(capsys):
    assert command.main(["now"]) == 2
    assert "usage: lockstep doctor" in capsys.readouterr().err
