"""Reaching Ray: the lazy import, and connecting to a cluster under a deadline."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from lockstep.errors import ConfigError, MissingExtra, ResourceError
from lockstep.single_controller.ray import leftovers

_PORT_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 60.0  # connecting takes a few seconds, on a loaded machine many more


def import_ray() -> ModuleType:
    """The module `ray`. Raises MissingExtra when it is not installed."""
    try:
        import ray
    except ImportError:
        raise MissingExtra("RayWorkerGroup", "ray", "ray") from None
    return ray


def connect(**ray_init_kwargs: Any) -> bool:
    """Start Ray, or connect to the cluster at `address` (or $RAY_ADDRESS), with the arguments of `ray.init`.

    True when this call did it, False when Ray was running in this process already. Raises ResourceError within about
    a minute when nothing answers at the address, ConfigError when Ray refuses the arguments, MissingExtra without Ray.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    address = ray_init_kwargs.get("address") or os.environ.get("RAY_ADDRESS")
    if address and address not in ("auto", "local"):
        _check_reachable(address)
    if not address and not _is_usable(_last_cluster()):
        ray_init_kwargs = ray_init_kwargs | {"address": "local"}
    try:
        with leftovers.watched():
            ray.init(**{"include_dashboard": False, "log_to_driver": True} | ray_init_kwargs)
    except (OSError, TimeoutError, ray.exceptions.RayError) as error:
        raise ResourceError(f"no Ray cluster was reached: {error}\nSee ray_kwargs.ray_init.address (now {address!r})") from None
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"ray.init refused ray_kwargs.ray_init={ray_init_kwargs}: {error}") from error
    except Exception as error:  # a node that is late raises just that
        raise ResourceError(
            f"Ray did not start: {str(error).splitlines()[0]} Start the run again when the machine is less busy"
        ) from error
    return True


def is_connected() -> bool:
    """Whether this process is connected to Ray; does not import it."""
    return sys.modules.get("ray") is not None and bool(sys.modules["ray"].is_initialized())


def disconnect() -> None:
    """Leave Ray, ending it if this process started it. Does nothing when Ray is not running here."""
    ray = import_ray()
    if ray.is_initialized():
        ray.shutdown()


def _last_cluster() -> str | None:
    """The address that Ray noted when it last started on this machine; `ray.init` without an address looks there first."""
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    return note.read_text().strip() if note.is_file() else None


def _is_usable(address: str | None) -> bool:
    """Whether Ray answers there. A cluster that was killed leaves its note, and by now another program may listen at its port, or a
    cluster with another token; `ray.init` would try for minutes."""
    if address is None:
        return False
    try:
        _check_reachable(address)
    except (ConfigError, ResourceError):
        return False
    return True


def _check_reachable(address: str) -> None:
    """Raise ResourceError unless Ray answers at the address.

    `ray.init` itself retries for minutes and cannot be interrupted, so a child process tries first, and can be ended.
    """
    url = urlsplit(address if "://" in address else f"//{address}")
    hint = "check ray_kwargs.ray_init.address (or $RAY_ADDRESS) and that `ray start --head` ran there"
    try:
        host = url.hostname
        port = url.port
    except ValueError:
        host = None
        port = None
    if host is None or port is None:
        raise ConfigError(f"ray_kwargs.ray_init.address must be 'auto', 'local' or host:port, got {address!r}")
    try:
        socket.create_connection((host, port), timeout=_PORT_TIMEOUT_S).close()
    except OSError as error:
        raise ResourceError(f"nothing answers at the Ray address {address!r}: {error}; {hint}") from None
    probe = [sys.executable, "-c", "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)", address]
    try:
        subprocess.run(probe, timeout=_PROBE_TIMEOUT_S, check=True, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"something listens at {address!r}, but Ray did not answer there in {_PROBE_TIMEOUT_S:g} s; {hint}"
        ) from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise ResourceError(f"Ray at {address!r} cannot be used: {reason}; {hint}") from None
