"""Which engines work on a Ray cluster, and what becomes of its address with the others."""

from collections.abc import Mapping
from typing import Any


def is_on_ray(engine: str) -> bool:
    """Whether an engine works on a cluster; the names say so."""
    return engine.startswith("ray")


def check_address(address: str | None, engine: str) -> None:
    """Raise ValueError for the address of a cluster that nothing would ask."""
    if address and not is_on_ray(engine):
        raise ValueError(
            "address must go with an engine that works on Ray (--engine ray or ray_pruned). "
            f"Received: address={address!r}, engine={engine!r}."
        )


def without_idle_address(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that a run remembers, without the address where their engine needs none."""
    idle = not is_on_ray(str(values.get("engine", "exact")))
    return {**values, "address": None} if idle else dict(values)
