"""Compiles the kernels of `benchmarks.gpu_router_gradient` on all cores at once, before any is launched.

Triton compiles one kernel after the other, in about a second each, and there are some 150 of them. Its cache on disk
hands them from the processes that compile here to the one that measures.
"""

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait

from benchmarks.gpu_checks import checks
from benchmarks.gpu_paths import configuration
from benchmarks.kernel_code import compile_call
from moe_routing.kernels import BLOCKS

Job = tuple[int, int]  # place in the list of checks, number of the configuration


def jobs() -> list[Job]:
    """Every configuration for the calls that are timed, one for each of the other checks."""
    found = []
    for place, check in enumerate(checks("cpu", (40,), full=False)):
        found += [(place, number) for number in (range(len(BLOCKS)) if check.number is None else (check.number,))]
    return found


def compile_job(job: Job, capability: int) -> None:
    """Compile both kernels of one check in one configuration."""
    place, number = job
    with configuration(number):
        compile_call(list(checks("cpu", (40,), full=False))[place].build(), capability)


def prepare(capability: int, todo: Sequence[Job], seconds: float) -> str:
    """Compile for so many seconds at most and tell what was done; a launch compiles what is missing then."""
    began = time.monotonic()
    workers = min(os.cpu_count() or 1, len(todo))
    # Spawned: a process that has begun to use a GPU cannot be forked.
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = [pool.submit(compile_job, job, capability) for job in todo]
        done, late = wait(futures, timeout=seconds)
        failed = sum(future.exception() is not None for future in done)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    spent = time.monotonic() - began
    return (
        f"{len(done) - failed} of {len(todo)} compilations ahead of time in {spent:.0f} s on {workers} cores"
        + (f", {failed} failed" if failed else "")
        + (f", {len(late)} too late" if late else "")
    )
