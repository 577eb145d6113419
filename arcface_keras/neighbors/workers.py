"""Tasks over threads, with the matrix products at one thread each."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np


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


def single_threaded_blas() -> AbstractContextManager[Any]:
    """Two levels of threads would fight for the cores: the tiles take them all, each product runs on one."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(limits=1, user_api="blas")


class ThreadBuffers:
    """Scratch arrays, one of a name for every thread, that grow as needed and keep their pages warm."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self, name: str, size: int, dtype: Any) -> np.ndarray:
        """(size,) array with any content, good until the thread asks for the same name again."""
        buffer = getattr(self._local, name, None)
        if buffer is None or len(buffer) < size:
            buffer = np.empty(size, dtype=dtype)
            setattr(self._local, name, buffer)
        return buffer[:size]

    def matrix_product(self, name: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """`left @ right.T` in such an array."""
        tile = self.get(name, len(left) * len(right), np.float32).reshape(len(left), len(right))
        np.matmul(left, right.T, out=tile)
        return tile
