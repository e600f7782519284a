import socket
import time

import pytest

from lockstep.errors import ConfigError, ResourceError
from lockstep.single_controller.ray import cluster

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Ray were not running in this process, and were never to start."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def no_init(**kwargs: object) -> None:
        raise AssertionError("ray.init must not be reached")

    monkeypatch.setattr(ray, "init", no_init)


@pytest.mark.usefixtures("ray_cluster")
def test_ray_that_is_running_already_is_kept() -> None:
    assert cluster.connect() is False
    assert ray.is_initialized()


@pytest.mark.usefixtures("without_ray")
def test_an_address_where_nothing_listens_is_a_resource_error_that_names_the_key() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ResourceError, match=rf"{address}.*ray_kwargs\.ray_init\.address"):
        cluster.connect(address=address)


@pytest.mark.usefixtures("without_ray")
def test_a_port_that_is_not_ray_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_PROBE_TIMEOUT_S", 3.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        start = time.monotonic()
        with pytest.raises(ResourceError, match=rf"{address}.*did not answer there in 3 s.*ray_kwargs\.ray_init\.address"):
            cluster.connect()
    assert time.monotonic() - start < 10


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("address", ["somewhere", "host:port", "host:99999999"])
def test_what_is_no_address_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"host:port, got '{address}'"):
        cluster.connect(address=address)


def test_arguments_that_ray_refuses_are_a_config_error(monkeypatch: pytest.MonkeyPatch, without_ray: None) -> None:
    def refuse(**kwargs: object) -> None:
        raise ValueError("num_cpus must not be given")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigError, match="num_cpus must not be given"):
        cluster.connect(num_cpus=1)


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("listens", [False, True], ids=["nothing listens", "another program listens"])
def test_the_note_of_a_killed_cluster_is_not_waited_for(tmp_path, monkeypatch, listens):
    """`ray.init` looks for the last cluster of the machine, and would try to reach a dead one for minutes."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "_PROBE_TIMEOUT_S", 3.0)
    asked = {}
    monkeypatch.setattr(ray, "init", asked.update)
    (tmp_path / "ray").mkdir()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{listener.getsockname()[1]}")
        if listens:
            listener.listen()
        assert cluster.connect()
    assert asked["address"] == "local"


@pytest.mark.usefixtures("without_ray")
def test_the_note_of_a_cluster_that_answers_is_left_to_ray(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    asked = {}
    monkeypatch.setattr(ray, "init", asked.update)
    probed = []
    monkeypatch.setattr(cluster, "_check_reachable", probed.append)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6379")
    assert cluster.connect()
    assert probed == ["127.0.0.1:6379"]
    assert "address" not in asked
