"""Spreading the batches of a run over a Ray cluster: one model a worker, a dead worker is replaced.

A batch belongs to one worker at a time, and its samples are handed out as they end. If the worker dies the
whole batch is given to another; samples that had been handed out before come a second time, equal to the
last bit, and the runner, which logs every sample once, lets them pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from kvkeep.core.errors import ConfigError, KvkeepError
from kvkeep.evaluation.extras import need
from kvkeep.evaluation.jobs import Completion, Generator, Job

# A batch that kills so many workers in a row would kill the next one too.
_ATTEMPTS = 3


class RayGenerator:
    """Generators on the workers of a Ray cluster, seen as one.

    Joins the cluster that ``RAY_ADDRESS`` names, or starts one on this machine.

    Parameters
    ----------
    factory
        Makes the generator; called on each worker, so it must be something that can be sent.
    workers
        How many; default: one per GPU of the cluster, or one.
    resources
        What a worker takes, as in ``ray.remote(**resources)``; default: a GPU if there are any.

    Raises
    ------
    MissingExtraError
        If Ray is not installed.
    KvkeepError
        If a batch fails on three workers in a row.
    """

    def __init__(
        self,
        factory: Callable[[], Generator],
        *,
        workers: int | None = None,
        resources: dict[str, float] | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"{workers} Ray workers are too few: give at least 1.")
        self._ray = need("ray", extra="ray", purpose="spreading a run over a cluster")
        self._started = not self._ray.is_initialized()
        if self._started:
            self._ray.init(log_to_driver=False, include_dashboard=False, logging_level="error")
        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        takes = resources if resources is not None else {"num_gpus": 1} if gpus else {"num_cpus": 1}
        self._worker = self._ray.remote(max_restarts=0, **takes)(_Worker)
        self._factory, self._count = factory, workers or max(1, gpus)
        self._workers = [self._start() for _ in range(self._count)]
        self._facts, self._random = self._ray.get(self._workers[0].describe.remote())

    @property
    def random(self) -> bool:
        return bool(self._random)

    def count_tokens(self, text: str) -> int:
        return int(self._ray.get(self._workers[0].count_tokens.remote(text)))

    def facts(self) -> dict[str, Any]:
        extra = {**self._facts.get("extra", {}), "ray_workers": self._count}
        return {**self._facts, "extra": extra}

    def generate(self, jobs: Sequence[Job]) -> Iterator[Completion]:
        return self.write([jobs])

    def write(self, batches: Sequence[Sequence[Job]]) -> Iterator[Completion]:
        """Write all batches, each sample handed out when it ends, in no particular order."""
        waiting = deque((batch, 1) for batch in batches)
        busy: dict[Any, tuple[Any, Sequence[Job], int]] = {}
        idle = deque(self._workers)
        while waiting or busy:
            while waiting and idle:
                worker, (batch, attempt) = idle.popleft(), waiting.popleft()
                busy[worker.write.remote(batch)] = worker, batch, attempt
            (stream,), _ = self._ray.wait(list(busy), num_returns=1)
            worker, batch, attempt = busy[stream]
            try:
                yield self._ray.get(next(stream))
                continue
            except StopIteration:
                idle.append(worker)
            except self._ray.exceptions.RayTaskError as error:
                raise error.as_instanceof_cause() from None  # the same would happen on every worker
            except self._ray.exceptions.RayError as error:
                if attempt == _ATTEMPTS:
                    raise KvkeepError(
                        f"a batch of {len(batch)} samples, the first for problem {batch[0].problem.id!r}, "
                        f"lost {attempt} workers in a row ({type(error).__name__}): perhaps memory is too "
                        "small for it; lower --batch-size and run again with --resume."
                    ) from error
                waiting.appendleft((batch, attempt + 1))
                idle.append(self._replace(worker))
            del busy[stream]

    def close(self) -> None:
        """End the workers, and the cluster if it was started here."""
        for worker in self._workers:
            self._ray.kill(worker)
        self._workers = []
        if self._started:
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Any:
        return self._worker.remote(self._factory)

    def _replace(self, dead: Any) -> Any:
        fresh = self._start()
        self._workers[self._workers.index(dead)] = fresh
        return fresh


class _Worker:
    """Lives on a worker: one generator."""

    def __init__(self, factory: Callable[[], Generator]) -> None:
        self._generator = factory()

    def describe(self) -> tuple[dict[str, Any], bool]:
        """Facts for the header, and whether draws differ."""
        return self._generator.facts(), self._generator.random

    def count_tokens(self, text: str) -> int:
        """Tokens of a text."""
        return self._generator.count_tokens(text)

    def write(self, jobs: Sequence[Job]) -> Iterator[Completion]:
        """The samples of a batch, each as it ends (a method that yields is streamed by Ray)."""
        yield from self._generator.generate(jobs)
