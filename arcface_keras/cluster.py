"""Work on a Ray cluster: the one that is there, or a local one that is started and stopped."""

import hashlib
import importlib
import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras._cores import available_cores
from arcface_keras._exchange import exchanging_in
from arcface_keras._native_log import native_stderr_to_null
from arcface_keras._on_ray import is_on_ray
from arcface_keras._version import __version__

INSTALL = "Work on Ray needs the package ray: pip install 'arcface-keras[ray]'"

_PATIENCE = 5.0
"""Seconds that a cluster may take to answer."""

_REPORT_SECONDS = 60.0
_OPENED: list[Any] = []
"""The session that this module has opened: its nodes were looked at then."""

_ADDRESS = re.compile(r"auto|local|(ray://)?(?P<host>[^\s/:]+|\[[0-9a-fA-F:]+\]):(?P<port>[0-9]{1,5})")
_BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# What processes of Ray read when they start: no nice level of their own, nothing sent anywhere, no warnings
# about Ray's own use of itself on the terminal, an end to trying what was ended for want of memory.
_START_VARIABLES = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_task_oom_retries": "5",
}
# HTTP/2's opening words and an empty frame of settings (RFC 9113, 3.4); all that Ray listens with answers.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS_FRAME = 4


@contextmanager
def ray_session(address: str | None = None, *, cpus: int | None = None) -> Iterator[Any]:
    """Give the module `ray`, connected.

    A session that this process has already opened is used and left open. Otherwise the cluster at `address`,
    or at the environment variable RAY_ADDRESS, is joined and left running; without one, a local Ray is
    started, and stopped at the end.

    Args:
        address: `HOST:PORT` of a cluster, `ray://HOST:PORT` of its client server, "auto" for the one that
            runs on this machine, "local" for a new one whatever RAY_ADDRESS says.
        cpus: processors of a local Ray; all that this process may use by default.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: nothing, or something else than Ray, answers at the address.
        ValueError: the address is none, or the versions of Ray, Python, numpy or this package differ between
            here and the cluster.

    Example:
        >>> with ray_session("10.0.0.1:6379") as ray:  # doctest: +SKIP
        ...     ray.get(ray.remote(work).remote(1))
    """
    wanted = address or os.environ.get("RAY_ADDRESS") or None
    ray = _import_ray(joins=wanted not in (None, "local"))
    if cpus is not None:
        check_count("cpus", cpus)
    wanted = _checked_address(wanted)
    if ray.is_initialized():
        if address not in (None, "auto", "local"):
            _check_same_cluster(ray, str(address))
        if not _OPENED:
            check_versions(ray)
        yield ray
        return
    with _environment(_START_VARIABLES):
        _connect(ray, wanted, cpus)
    try:
        check_versions(ray)
        _OPENED.append(ray)
        yield ray
    finally:
        _OPENED.clear()
        ray.shutdown()


@contextmanager
def session_of(engine: str, address: str | None = None, folder: Path | None = None) -> Iterator[None]:
    """A session of Ray for an engine that needs one, shared by its searches; see `ray_session`.

    Searches exchange their files in `folder`, which all nodes see and no other process works in; without it
    among the temporary files.
    """
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(exchanging_in(folder))
        if is_on_ray(engine):
            stack.enter_context(ray_session(address))
        yield


def worker_environment() -> dict[str, Any]:
    """The `runtime_env` of a session: BLAS with one thread a task, and this package where it is a checkout.

    Workers import this package as they find it installed. From a checkout they import it from the checkout's
    folder, which every node must then see at the same path.
    """
    variables = dict.fromkeys(_BLAS_VARIABLES, "1")
    root = Path(__file__).resolve().parent.parent
    if not {"site-packages", "dist-packages"} & set(root.parts):
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    return {"env_vars": variables}


def versions() -> dict[str, str]:
    """Versions that must be the same wherever a job runs."""
    ray = importlib.import_module("ray")
    return {
        "ray": ray.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": np.__version__,
        "arcface_keras": __version__,
        "the modules of arcface_keras": _package_digest(),
    }


def _package_digest() -> str:
    """Digest of this package's modules: a worker may find a checkout beside the package that is installed."""
    root = Path(__file__).resolve().parent
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _versions_beside(_: None) -> dict[str, str]:
    """`versions`, once an object of the process that asks has come."""
    return versions()


def check_versions(ray: Any) -> None:
    """Compare the versions here with those of every node that is alive.

    Raises:
        ValueError: they differ, or a node cannot import this package.
        ConnectionError: a node does not answer, or cannot fetch what this process holds.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    report = ray.remote(num_cpus=0, max_retries=1)(_versions_beside)
    here, stored = versions(), ray.put(None)
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
            asked[report.options(scheduling_strategy=there).remote(stored)] = node["NodeManagerAddress"]
    ready, waiting = ray.wait(list(asked), num_returns=len(asked), timeout=_REPORT_SECONDS)
    if waiting:
        raise ConnectionError(
            f"every node of the cluster must answer within {_REPORT_SECONDS:.0f} s. "
            f"Received: nothing from {asked[waiting[0]]}."
        )
    for answer in ready:
        try:
            found = ray.get(answer)
        except ray.exceptions.ObjectLostError as error:
            raise ConnectionError(
                f"every node must be able to fetch what this process holds (where this machine has a token "
                f"and the cluster takes none, RAY_AUTH_MODE must be disabled). "
                f"Received: {asked[answer]}: {_last_line(error)}"
            ) from error
        except ray.exceptions.RayError as error:
            raise ValueError(
                f"every node must be able to import arcface_keras {__version__} (installed there, or as a "
                f"checkout at the same path). Received: {asked[answer]}: {_last_line(error)}"
            ) from error
        compare_versions(here, found, asked[answer])


def compare_versions(here: Mapping[str, str], there: Mapping[str, str], node: str) -> None:
    """Raise a ValueError that names the first version which differs on a node."""
    for name, version in here.items():
        if there.get(name) != version:
            raise ValueError(
                f"{name} must have the same version here and on the cluster. "
                f"Received: {version} here, {there.get(name)} on the node {node}."
            )


def _import_ray(joins: bool = False) -> Any:
    # Read when Ray is imported, not when it starts.
    with _environment(_START_VARIABLES | (_token_variables() if joins else {})):
        try:
            return importlib.import_module("ray")
        except ImportError as error:
            raise ImportError(INSTALL) from error


def _token_variables() -> dict[str, str]:
    """Show a token where there is one, unless `RAY_AUTH_MODE` says otherwise.

    Ray 2.60 asks for it wherever a cluster was started beside one, but does not show its own to an address. A
    cluster that takes none cannot reach a process that shows one: there the mode must be "disabled".
    """
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    there = "RAY_AUTH_TOKEN" in os.environ or file.is_file()
    return {"RAY_AUTH_MODE": "token"} if there else {}


def _checked_address(address: str | None) -> str:
    if address is None:
        return "local"
    found = _ADDRESS.fullmatch(address)
    if not found or int(found["port"] or 1) not in range(1, 65_536):
        raise ValueError(
            f"address must be HOST:PORT, ray://HOST:PORT, auto or local. Received: address={address!r}."
        )
    if found["host"] is not None:
        _check_answers(address, found["host"].strip("[]"), int(found["port"]))
    return address


def _check_answers(address: str, host: str, port: int) -> None:
    """Ray itself takes minutes to find out that nobody, or somebody else, listens."""
    try:
        with socket.create_connection((host, port), timeout=_PATIENCE) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            connection.sendall(_PREFACE)
            answer = connection.recv(9)
    except OSError as error:
        raise ConnectionError(
            f"a Ray cluster must answer at the address. Received: address={address!r}: {error}."
        ) from error
    if len(answer) < 4 or answer[3] != _SETTINGS_FRAME:
        raise ConnectionError(
            f"a Ray cluster must answer at the address. "
            f"Received: address={address!r}, where something else listens."
        )


def _check_same_cluster(ray: Any, address: str) -> None:
    own = ray.get_runtime_context().gcs_address
    _, _, port = own.rpartition(":")
    if address not in (own, f"127.0.0.1:{port}", f"localhost:{port}") and not address.startswith("ray://"):
        raise ValueError(
            f"address must be that of the session that is open in this process, {own} (or left out). "
            f"Received: address={address!r}."
        )


def _connect(ray: Any, address: str, cpus: int | None) -> None:
    options: dict[str, Any] = {"runtime_env": worker_environment(), "log_to_driver": False}
    options["logging_level"] = "ERROR"
    if address == "local":
        options |= {"num_cpus": cpus or available_cores(), "include_dashboard": False}
    try:
        with native_stderr_to_null():
            ray.init(address=address, **options)
    except (RuntimeError, ConnectionError, ValueError) as error:
        ray.shutdown()
        if "version mismatch" in str(error).lower():
            raise ValueError(
                f"Ray and Python must have the same versions here and on the cluster. "
                f"Received: {' '.join(str(error).split())}"
            ) from error
        if address == "local":
            raise
        raise ConnectionError(
            f"a Ray cluster that this machine is part of must answer at the address (a machine outside takes "
            f"ray://HOST:PORT; a cluster that asks for a token takes RAY_AUTH_MODE=token and "
            f"RAY_AUTH_TOKEN_PATH). Received: address={address!r}: {_last_line(error)}"
        ) from error


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set what is not set, for a while."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _last_line(error: BaseException) -> str:
    """What an error says in the end; gRPC's own end with a bracket, after a line of details."""
    lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalnum, line))]
    details = [line for line in lines if line.startswith("details =")]
    return (details or lines or [repr(error)])[-1]
