"""Chat completions of an OpenAI-compatible endpoint: bounded in time, size and number, retried, kept on disk.

The client is httpx2, on which the `openai` package itself stands. Bounding a whole exchange needs the bytes as they
come, which `openai` does not hand out; what it would add, its retries, does not see an answer cut half-way.
"""

import atexit
import hashlib
import json
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rewards._breaker import Breaker
from rewards._client import make_client
from rewards._disk import read_entry, write_entry

# Status codes that another try can cure; others are about the request itself.
_TRANSIENT = frozenset({408, 409, 425, 429})
_LARGEST_ANSWER = 8 * 2**20
_LONGEST_WAIT = 60.0
_LONGEST_REASON = 300


class EndpointError(RuntimeError):
    """The endpoint gave no answer.

    Attributes:
        status: the HTTP status, None where there was none.
        transient: whether another try may succeed.
    """

    def __init__(self, message: str, status: int | None = None, transient: bool = True, wait: float = 0.0) -> None:
        super().__init__(message[:_LONGEST_REASON])
        self.status, self.transient, self.wait = status, transient, wait


class _NoAnswerError(EndpointError):
    """Nothing came back, or not all of it."""


class _Connection(NamedTuple):
    client: Any
    slots: threading.BoundedSemaphore
    breaker: Breaker


# By process, since a connection does not survive a fork, and outside of the endpoints, so that these can be pickled.
_connections: dict[tuple[int, str, float, int, float], _Connection] = {}


@dataclass(frozen=True)
class ChatEndpoint:
    """A model behind `{base_url}/chat/completions`. Holds settings only, so it pickles; threads may share it.

    Args:
        base_url: "http://localhost:8000/v1".
        model: the model's name on that endpoint.
        api_key: sent as bearer token; None takes the environment's `OPENAI_API_KEY`, if any, when asked.
        temperature: sampling temperature.
        max_tokens: most tokens of an answer.
        timeout: seconds for one exchange, from the connection to the last byte. The bound is checked at every piece of
            the body that arrives, so a server that falls silent half-way is left after twice that at most; one that
            drips its headers, byte by byte, holds the exchange until they end or it falls silent.
        retries: tries after the first, on transport errors, cut answers, 408, 409, 425, 429 and 5xx.
        backoff: seconds before the first of them, doubled each time, with jitter; a longer `Retry-After` is obeyed.
        concurrency: exchanges at once in this process with this endpoint.
        cache_dir: a folder that keeps every answer under the hash of its full request; None keeps none.
        extra: further fields of the request, as `{"chat_template_kwargs": {"enable_thinking": False}}`.
        cooldown: when `concurrency` requests in a row have used up their tries on transport errors and timeouts,
            requests and retries of this process fail at once for so many seconds; then one is let through, once, and
            any answer ends the pause. 0: every request is tried, however long the server has been silent.

    Raises:
        ValueError: a setting out of range; the message names it. When asked, so does a proxy variable of the
            environment that httpx2 cannot use.

    Example:
        >>> ChatEndpoint("localhost:8000", "m")
        Traceback (most recent call last):
        ValueError: base_url: expected http:// or https://, got 'localhost:8000'

    Reference: ours.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    temperature: float = 0.0
    max_tokens: int = 4096
    timeout: float = 60.0
    retries: int = 4
    backoff: float = 0.5
    concurrency: int = 16
    cache_dir: str | os.PathLike[str] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    cooldown: float = 60.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url: expected http:// or https://, got {self.base_url!r}")
        bounds = {"temperature": 0, "max_tokens": 1, "retries": 0, "backoff": 0, "concurrency": 1, "cooldown": 0}
        for name, least in bounds.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}: expected >= {least}, got {getattr(self, name)}")
        if not self.timeout > 0:
            raise ValueError(f"timeout: expected > 0 seconds, got {self.timeout}")

    def chat(
        self, messages: Sequence[Mapping[str, str]], seed: int | None = None, keep: Callable[[str], bool] = bool
    ) -> str:
        """The text of one completion.

        Args:
            messages: the chat.
            seed: sent along if given, so that several samples of one chat are several requests.
            keep: whether an answer may be kept in, and taken from, `cache_dir`; an empty one is not unless told.

        Returns:
            the answer's text, "" where the model gave none.

        Raises:
            EndpointError: no answer after all tries.
            ValueError: the API key cannot stand in a header; a proxy variable that httpx2 cannot use.
            ImportError: httpx2 is not installed.
        """
        body = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **({} if seed is None else {"seed": seed}),
            **self.extra,
        }
        # Half a surrogate pair, which a model can write, is no UTF-8.
        request = json.dumps(body, ensure_ascii=False, sort_keys=True).encode("utf-8", "replace")
        if self.cache_dir is None:
            return self._ask(request)
        key = hashlib.sha256(self._url.encode() + b"\n" + request).hexdigest()
        kept = read_entry(Path(self.cache_dir), key)
        if kept is not None and keep(kept):
            return kept
        said = self._ask(request)
        if keep(said):
            try:
                write_entry(Path(self.cache_dir), key, said)
            except OSError as error:  # a full disk costs the next run a question, not this run its answer
                warnings.warn(f"cache_dir: an answer was not kept: {error}", stacklevel=2)
        return said

    @cached_property
    def _url(self) -> str:
        return self.base_url.rstrip("/") + "/chat/completions"

    def _ask(self, request: bytes) -> str:
        breaker = self._connection().breaker
        for tried in range(self.retries + 1):
            try:
                return self._exchange(request)
            except EndpointError as error:
                if tried == self.retries or not error.transient or breaker.opened.is_set():
                    if isinstance(error, _NoAnswerError):
                        breaker.gave_up()
                    raise
                wait = self.backoff * 2**tried * random.uniform(0.5, 1.5)
                breaker.opened.wait(min(max(wait, error.wait), _LONGEST_WAIT))
        raise AssertionError("unreachable")

    def _exchange(self, request: bytes) -> str:
        import httpx2

        connection = self._connection()
        with connection.slots:
            if left := connection.breaker.refuses():
                raise EndpointError(f"not asked: silent {self.concurrency} times in a row, next try in {left:.0f} s")
            end = time.monotonic() + self.timeout
            try:
                with connection.client.stream("POST", self._url, content=request, headers=self._headers()) as response:
                    body = _read(response, end, self.timeout)
            except (httpx2.TransportError, httpx2.DecodingError, httpx2.InvalidURL) as error:
                lasting = isinstance(error, (httpx2.InvalidURL, httpx2.UnsupportedProtocol))
                raise _NoAnswerError(f"{type(error).__name__}: {error}", transient=not lasting) from error
        connection.breaker.answered()
        if response.status_code != 200:
            status, transient = response.status_code, response.status_code in _TRANSIENT or response.status_code >= 500
            text = body[: 2 * _LONGEST_REASON].decode("utf-8", "replace")
            raise EndpointError(f"HTTP {status}: {text}", status, transient, _retry_after(response))
        return _content(body)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        key = os.environ.get("OPENAI_API_KEY") if self.api_key is None else self.api_key
        if key and not (key.isascii() and key.isprintable()):
            # A line's end that came along from a file would make every answer an absent one.
            raise ValueError("api_key: expected printable ASCII, as a header has it")
        return headers | ({"Authorization": f"Bearer {key}"} if key else {})

    def _connection(self) -> _Connection:
        key = (os.getpid(), self.base_url, self.timeout, self.concurrency, self.cooldown)
        if key not in _connections:
            client = make_client(self.timeout, self.concurrency)
            breaker = Breaker(self.concurrency, self.cooldown, self.timeout)
            made = _Connection(client, threading.BoundedSemaphore(self.concurrency), breaker)
            if _connections.setdefault(key, made) is not made:  # another thread was first
                client.close()
        return _connections[key]


@atexit.register
def _close() -> None:
    for (process, *_), connection in _connections.items():
        if process == os.getpid():  # a fork must not say goodbye on its parent's connections
            connection.client.close()


def _read(response: Any, end: float, timeout: float) -> bytes:
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > _LARGEST_ANSWER:
            raise EndpointError(f"the answer is larger than {_LARGEST_ANSWER} bytes", transient=False)
        if time.monotonic() > end:
            raise _NoAnswerError(f"no whole answer within {timeout} s")
    return bytes(body)


def _retry_after(response: Any) -> float:
    try:
        return max(float(response.headers.get("Retry-After", 0)), 0.0)
    except ValueError:  # a date; the backoff will do
        return 0.0


def _content(body: bytes) -> str:
    """The text of a completion; a body that is none counts as cut."""
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise EndpointError(f"not a chat completion: {type(error).__name__}: {error}") from error
    if content is not None and not isinstance(content, str):
        raise EndpointError(f"not a chat completion: the content is {type(content).__name__}")
    return content or ""
