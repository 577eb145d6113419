"""The session on Ray: joined or started, with clear errors where it cannot be."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_nodes import ray_cluster

from arcface_keras import cluster
from arcface_keras.cluster import compare_versions, ray_session, worker_environment


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with ray_cluster(1) as running:
        yield running


def test_session_joins_a_cluster_and_leaves_it_running(nodes: Any) -> None:
    def state() -> dict[str, Any]:
        from arcface_keras.cluster import versions

        names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
        threads = [os.environ.get(name) for name in names]
        return {"nice": os.nice(0), "threads": threads, "package": versions()}

    for _ in range(2):
        with ray_session(nodes.address) as ray:
            found = ray.get(ray.remote(state).remote())
            assert found["nice"] == os.nice(0), "Ray made its workers nicer than this process"
            assert found["threads"] == ["1", "1"]
            assert found["package"] == cluster.versions()
        assert not ray.is_initialized()


def test_session_reads_the_address_of_the_environment(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    with ray_session() as ray:
        assert ray.get_runtime_context().gcs_address == nodes.address


def test_session_uses_the_one_that_is_open_and_leaves_it_open(nodes: Any) -> None:
    with ray_session(nodes.address) as ray:
        with ray_session() as inner:
            assert inner.get_runtime_context().gcs_address == nodes.address
        with ray_session(f"localhost:{nodes.address.split(':')[1]}"):
            pass
        assert ray.is_initialized()
        with listener(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00") as other:
            message = f"session that is open in this process.*address='{other}'"
            with pytest.raises(ValueError, match=message), ray_session(other):
                pass
        assert ray.is_initialized()


def test_session_names_versions_that_differ_on_the_cluster(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arcface_keras._version import __version__

    monkeypatch.setattr(cluster, "__version__", "9.9")
    message = rf"arcface_keras must have the same version .* Received: 9\.9 here, {__version__} on the node"
    with pytest.raises(ValueError, match=message), ray_session(nodes.address):
        pass
    monkeypatch.undo()
    import ray

    assert not ray.is_initialized()
    own = ray.__version__
    monkeypatch.setattr(ray, "__version__", "1.2.3")
    with (
        pytest.raises(ValueError, match=rf"same versions here and on the cluster.*{own}.*1\.2\.3"),
        ray_session(nodes.address),
    ):
        pass
    assert not ray.is_initialized()


def test_session_names_a_token_that_the_cluster_does_not_take(nodes: Any, tmp_path: Path) -> None:
    """Ray lets such a process in, and nothing that it holds out."""
    pytest.importorskip("ray._private.authentication", reason="this Ray knows no tokens")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x" * 64)
    script = "import sys; from arcface_keras.cluster import ray_session\nwith ray_session(sys.argv[1]): pass"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(Path(cluster.__file__).parents[1])}
    done, told = (
        subprocess.run(
            [sys.executable, "-c", script, nodes.address],
            env=environment | more,
            capture_output=True,
            text=True,
            check=False,
        )
        for more in ({}, {"RAY_AUTH_MODE": "disabled"})
    )
    assert "ConnectionError: every node must be able to fetch what this process holds" in done.stderr
    assert "RAY_AUTH_MODE must be disabled" in done.stderr
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("name", ["ray", "python", "numpy", "arcface_keras", "the modules of arcface_keras"])
def test_compare_versions_names_what_differs(name: str) -> None:
    here = cluster.versions()
    assert here["numpy"] == np.__version__
    compare_versions(here, dict(here), "n")
    message = f"{name} must have the same version .* Received: {here[name]} here, 0.0 on the node n"
    with pytest.raises(ValueError, match=message):
        compare_versions(here, here | {name: "0.0"}, "n")


def test_worker_environment_finds_a_checkout_but_no_installed_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setattr(cluster, "__file__", "/some/checkout/arcface_keras/cluster.py")
    assert worker_environment()["env_vars"]["PYTHONPATH"] == "/some/checkout:/elsewhere"
    monkeypatch.setattr(cluster, "__file__", "/venv/site-packages/arcface_keras/cluster.py")
    assert "PYTHONPATH" not in worker_environment()["env_vars"]


def test_session_without_ray_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'arcface-keras\[ray\]'"), ray_session():
        pass


@pytest.mark.parametrize("address", ["somewhere", "host:99999", "host:0", "http://host:80", "a b:1", ":6379"])
def test_session_names_a_malformed_address(address: str) -> None:
    with (
        pytest.raises(
            ValueError, match="address must be HOST:PORT, ray://HOST:PORT, auto or local. Received"
        ),
        ray_session(address),
    ):
        pass


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_session_says_within_seconds_that_nobody_answers(scheme: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{free.getsockname()[1]}"
    check_refused(address, "refused")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_session_says_within_seconds_that_something_else_answers(answer: bytes) -> None:
    with listener(answer) as address:
        check_refused(address, "where something else listens")


def test_session_says_within_seconds_that_no_answer_comes() -> None:
    with listener(None) as address:
        check_refused(address, "timed out")


def check_refused(address: str, reason: str) -> None:
    started = time.perf_counter()
    with (
        pytest.raises(ConnectionError, match=f"must answer at the address.*{address}.*{reason}"),
        ray_session(address),
    ):
        pass
    assert time.perf_counter() - started < 15


class listener:  # noqa: N801
    """Something that listens, and answers every connection with these bytes; None: with none, ever."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer, self.socket = answer, socket.create_server(("127.0.0.1", 0))
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.serve)

    def serve(self) -> None:
        while True:
            connection, _ = self.socket.accept()
            with connection:
                if self.over.is_set():
                    return
                connection.recv(64)
                if self.answer is None:
                    self.over.wait(20)
                else:
                    connection.sendall(self.answer)

    def __enter__(self) -> str:
        self.thread.start()
        return f"127.0.0.1:{self.socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self.over.set()
        socket.create_connection(self.socket.getsockname()).close()
        self.thread.join()
        self.socket.close()


def test_token_is_shown_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster.Path, "home", lambda: tmp_path)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert cluster._token_variables() == {}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x")
    assert cluster._token_variables() == {"RAY_AUTH_MODE": "token"}
    (tmp_path / ".ray" / "auth_token").rename(tmp_path / "token")
    assert cluster._token_variables() == {}
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert cluster._token_variables() == {"RAY_AUTH_MODE": "token"}


def test_last_line_of_an_error_has_words() -> None:
    grpc = '<Rendezvous of RPC that terminated with:\n\tdetails = "gone"\n\tdebug = "x"\n>'
    assert cluster._last_line(RuntimeError(grpc)) == 'details = "gone"'
    assert cluster._last_line(RuntimeError("first\nlast \n\n")) == "last"
    assert cluster._last_line(RuntimeError()) == "RuntimeError()"
