"""Processes of math-verify that can be killed.

Its own timeout works on the main thread only, and big-number arithmetic holds the interpreter's lock, so a tower of
powers would stop the trainer for good.
"""

import atexit
import importlib.util
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_START_TIMEOUT = 120.0
_MEMORY_MB = 2048


class _Worker:
    """One process of math-verify, started when first needed and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, pair: Sequence[str], timeout: float) -> str | None:
        """The verdict; None where the process took too long or died, and is gone."""
        process = self._process or self._start()
        try:
            process.stdin.write(json.dumps(pair).encode() + b"\n")  # type: ignore[union-attr]  # it is a pipe
            verdict = _line(process, timeout)
        except OSError:
            verdict = None
        if verdict is None:
            self.kill()
        return verdict

    def _start(self) -> "subprocess.Popen[bytes]":
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("comparing answers needs math-verify: pip install math-verify")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rewards._math_worker", str(_MEMORY_MB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        if _line(self._process, _START_TIMEOUT) != "ready":
            self.kill()
            raise RuntimeError("the process of math-verify does not start; `import math_verify` says why")
        return self._process

    def kill(self) -> None:
        """End the process, if there is one, and reap it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                pipe.close()  # type: ignore[union-attr]  # both are pipes


def _line(process: "subprocess.Popen[bytes]", timeout: float) -> str | None:
    """The next line of the process, None where it does not come in time."""
    end, line = time.monotonic() + timeout, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]  # it is a pipe
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not selector.select(left):
                return None
            piece = process.stdout.read(4096)  # type: ignore[union-attr]
            if not piece:
                return None
            line += piece
    return line.decode().strip()


class _Pool:
    """Workers that threads take and give back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._all = [_Worker() for _ in range(size)]
        # Last in, first out: one caller keeps one process warm instead of starting all of them.
        self._free: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._all:
            self._free.put(worker)

    def ask(self, pair: Sequence[str], timeout: float) -> str | None:
        worker = self._free.get()
        try:
            return worker.ask(pair, timeout)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        for worker in self._all:
            worker.kill()


# By process: after a fork the pipes belong to the parent.
_pools: dict[int, _Pool] = {}
_lock = threading.Lock()


def math_pool() -> _Pool:
    """The pool of this process."""
    with _lock:
        if os.getpid() not in _pools:
            _pools[os.getpid()] = _Pool(min(8, os.cpu_count() or 1))
        return _pools[os.getpid()]


@atexit.register
def _close() -> None:
    if os.getpid() in _pools:
        _pools[os.getpid()].close()
