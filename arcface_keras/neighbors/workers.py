"""Tasks over threads, with the matrix products at one thread each."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any


def run_tasks(do: Callable[[Any], None], tasks: list[Any], threads: int, bar: Any) -> None:
    """Do all tasks on some threads; the first error stops them all."""
    queue: Iterator[Any] = iter(tasks)
    lock = threading.Lock()
    stopped = threading.Event()

    def work() -> None:
        try:
            while not stopped.is_set():
                with lock:
                    task = next(queue, None)
                if task is None:
                    return
                do(task)
                with lock:
                    bar.update(1)
        except BaseException:
            stopped.set()
            raise

    if min(threads, len(tasks)) <= 1:
        work()
        return
    with ThreadPoolExecutor(threads) as pool:
        try:
            for future in [pool.submit(work) for _ in range(threads)]:
                future.result()
        finally:
            stopped.set()


def available_cores() -> int:
    """Cores that this process may use, which containers often make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def single_threaded_blas() -> AbstractContextManager[Any]:
    """Two levels of threads would fight for the cores: the tiles take them all, each product runs on one."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(limits=1, user_api="blas")
