"""Who does the tasks of a distributed search: this process, one after the other, or a Ray cluster."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from arcface_keras._cores import available_cores

Task = tuple[str, tuple[Any, ...]]
"""What an error calls it, and the arguments of its function."""

_RETRIES = 5
_IN_FLIGHT_PER_CPU = 3
_WIDEST = 16


class Runner(Protocol):
    """Does tasks.

    Attributes:
        cpus: tasks at a time.
        threads: threads that each may take.
        widest: threads that a single task may take, if it asks for so many processors.
    """

    cpus: int
    threads: int
    widest: int

    def run(
        self, function: Callable[..., Any], tasks: Sequence[Task], bar: Any, *, cpus: int = 1
    ) -> list[Any]:
        """Return what `function(*arguments)` gives for every task, in their order; counts them in the bar."""


class LocalRunner:
    """One task after the other in this process."""

    def __init__(self, threads: int | None = None) -> None:
        self.cpus, self.threads = 1, threads or available_cores()
        self.widest = self.threads

    def run(
        self, function: Callable[..., Any], tasks: Sequence[Task], bar: Any, *, cpus: int = 1
    ) -> list[Any]:
        results = []
        for _, arguments in tasks:
            results.append(function(*arguments))
            bar.update(1)
        return results


class RayRunner:
    """Tasks of one processor each, on a session of Ray, a bounded number of them under way at a time.

    A task whose process or node dies is done again elsewhere, `_RETRIES` times. One that Ray itself ends for
    want of memory would begin again for ever, were it not for RAY_task_oom_retries, which `ray_session` sets
    before it imports Ray (a process that has imported Ray already sets it itself). What a task leaves lies in
    files, and its result is small, so the object store stays empty.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        self.cpus, self.threads = max(1, sum(nodes)), 1
        self.widest = max(1, min(_WIDEST, max(nodes, default=1)))

    def run(
        self, function: Callable[..., Any], tasks: Sequence[Task], bar: Any, *, cpus: int = 1
    ) -> list[Any]:
        ray = self._ray
        remote = ray.remote(num_cpus=cpus, max_retries=_RETRIES, retry_exceptions=False)(function)
        results: list[Any] = [None] * len(tasks)
        running: dict[Any, int] = {}
        waiting = iter(enumerate(tasks))
        try:
            while True:
                while len(running) < _IN_FLIGHT_PER_CPU * self.cpus:
                    number, task = next(waiting, (-1, None))
                    if task is None:
                        break
                    running[remote.remote(*task[1])] = number
                if not running:
                    return results
                done, _ = ray.wait(list(running), num_returns=1)
                for answer in done:
                    number = running.pop(answer)
                    results[number] = self._result(answer, tasks[number][0])
                    bar.update(1)
        finally:
            for answer in running:
                with suppress(Exception):
                    ray.cancel(answer, force=False)

    def _result(self, answer: Any, name: str) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(answer)
        except exceptions.RayTaskError as error:
            cause = error.cause
            kind = next((k for k in (ValueError, MemoryError, OSError) if isinstance(cause, k)), RuntimeError)
            raise kind(f"{name}: {cause}") from error
        except exceptions.OutOfMemoryError as error:
            raise MemoryError(
                f"{name}: memory_mb must be what every processor of a node has for itself. "
                f"Received: Ray ended the task, {_first_line(error)}"
            ) from error
        except exceptions.RayError as error:
            raise ConnectionError(
                f"{name}: some node must live long enough to do it. "
                f"Received: {_RETRIES} retries, {_first_line(error)}"
            ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
