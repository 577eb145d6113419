"""How many processors this process may use."""

import os


def available_cores() -> int:
    """Cores that this process may use, which containers often make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
