"""The progress bar of every long stage: one rule for when it shows."""

from typing import Any


def progress_bar(total: int, desc: str, unit: str, enabled: bool = True) -> Any:
    """Return a `tqdm` bar that shows only when `enabled` and standard error is a terminal.

    Args:
        total: number of units the stage will count with `bar.update(n)`.
        desc: what the stage does, in front of the bar.
        unit: what is counted; the bar shows `unit/s` and the time left.
        enabled: False keeps quiet wherever standard error leads.

    Returns:
        A `tqdm.tqdm`, to be used as a context manager.
    """
    from tqdm import tqdm

    return tqdm(total=total, desc=desc, unit=f" {unit}", disable=None if enabled else True)
