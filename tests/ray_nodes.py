"""Ray clusters on this machine, for tests."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A new folder, in memory where there is such: many small files, flushed one by one, take long."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster`: a head without processors, and one node for each count in `cpus`."""
    pytest.importorskip("ray", reason="Ray is not installed")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Else who joins would show the token of this machine's user, if there is one, to nodes that take none.
    mode = os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for count in cpus:
            cluster.add_node(num_cpus=count)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
        if mode == "disabled":
            os.environ.pop("RAY_AUTH_MODE", None)
