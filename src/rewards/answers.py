"""RIVET's outcome: is the final answer the reference, as mathematics?

math-verify runs in processes that can be killed. Its own timeout works on the main thread only, and big-number
arithmetic holds the interpreter's lock, so a tower of powers would stop the trainer for good.
"""

import atexit
import importlib.util
import json
import os
import queue
import re
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_MARK = re.compile(r"Answer:[ \t]*\\boxed\{")
_BOX = "\\boxed{"
# Longer ones are not answers, and would only keep a process busy until it is killed.
_LONGEST_ANSWER = 2000
_START_TIMEOUT = 120.0
_MEMORY_MB = 2048


def final_answer(text: str) -> str | None:
    """What stands in the last box of the last `Answer: \\boxed{…}`; None where there is no whole one.

    Boxes after the last `Answer:` that opens one count too, and the last of them is taken.

    Example:
        >>> final_answer(r"Answer: \\boxed{4} no wait \\boxed{\\frac{1}{2}}")
        '\\\\frac{1}{2}'
        >>> final_answer(r"so \\boxed{4}") is None
        True

    Reference: the answer line of RIVET; the last box is ours.
    """
    last = text.rfind("Answer:")
    mark = None
    while last >= 0 and mark is None:
        mark = _MARK.match(text, last)
        last = text.rfind("Answer:", 0, last)
    if mark is None:
        return None
    start = text.rfind(_BOX) + len(_BOX)
    depth, at = 1, start
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if not depth:
                return text[start:at].strip()
        at += 1
    return None


def verify_answer(text: str, reference: str, timeout: float = 5.0) -> bool:
    """Whether the final answer of a text equals the reference, as mathematics.

    Args:
        text: what the model wrote; its answer is the last `Answer: \\boxed{…}`.
        reference: the right answer, LaTeX or plain, boxed or not.
        timeout: seconds for the comparison; one that takes longer is not equal, and its process is killed.

    Returns:
        Whether they are equal; False without an answer. No model output raises or hangs.

    Raises:
        ValueError: the reference is empty or no mathematics.
        ImportError: math-verify is not installed.

    Example:
        >>> verify_answer(r"Half of it. Answer: \\boxed{\\frac{1}{2}}", r"\\frac{1}{2}")
        True
        >>> verify_answer("I do not know.", "4")
        False

    Reference: RIVET, outcome reward; the process pool is ours.
    """
    wanted = _reference(reference)
    given = final_answer(text)
    if not given or len(given) > _LONGEST_ANSWER:
        return False
    if "".join(given.split()) == "".join(wanted.split()):
        return True
    verdict = _pool().ask([given, wanted], timeout)
    if verdict == "?":
        raise ValueError(f"reference: math-verify cannot read {reference[:80]!r}")
    return verdict == "1"


def verify_answers(texts: Sequence[str], references: Sequence[str], timeout: float = 5.0) -> list[bool]:
    """`verify_answer` for a batch, on all processes of the pool.

    Raises:
        ValueError: as `verify_answer`, or there are not as many references as texts.
    """
    if len(texts) != len(references):
        raise ValueError(f"references: {len(references)} for {len(texts)} texts")
    if not texts:
        return []
    with ThreadPoolExecutor(_pool().size) as threads:
        return list(threads.map(lambda text, reference: verify_answer(text, reference, timeout), texts, references))


def outcome_reward(text: str, reference: str) -> float:
    """RIVET's outcome.

        R = +1 if the final answer equals the reference, else −1

    Args:
        text: what the model wrote.
        reference: the right answer.

    Returns:
        1.0 or −1.0; −1.0 without an answer.

    Raises:
        ValueError, ImportError: as `verify_answer`.

    Example:
        >>> outcome_reward(r"Answer: \\boxed{4} no wait \\boxed{5}", "5"), outcome_reward("5", "5")
        (1.0, -1.0)

    Reference: RIVET section 3.3.
    """
    return 1.0 if verify_answer(text, reference) else -1.0


def _reference(reference: str) -> str:
    """The reference without box or dollar signs."""
    bare = reference.strip()
    if _BOX in bare:
        bare = final_answer(f"Answer: {bare[bare.rfind(_BOX) :]}") or ""
    bare = bare.strip("$").strip()
    if not bare:
        raise ValueError(f"reference: expected an answer, got {reference[:80]!r}")
    return bare


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


def _pool() -> _Pool:
    with _lock:
        if os.getpid() not in _pools:
            _pools[os.getpid()] = _Pool(min(8, os.cpu_count() or 1))
        return _pools[os.getpid()]


@atexit.register
def _close() -> None:
    if os.getpid() in _pools:
        _pools[os.getpid()].close()
