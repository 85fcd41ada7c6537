"""A real HTTP server on this machine that misbehaves as it is told."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Keeps what was asked and hands it to the next reply of the script; the last one is repeated."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(self.body)
            self.server.paths.append(self.path)
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            script = self.server.script
            reply = script.pop(0) if len(script) > 1 else script[0]
        try:
            reply(self)
        except OSError:
            self.close_connection = True  # the client hung up, which is what some tests want
        finally:
            with self.server.lock:
                self.server.now -= 1

    def send(self, body: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """The server, with what it was asked and how many requests it held at once at most."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, script: Sequence[Reply]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()
        self.now = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def serving(*script: Reply) -> Iterator[Server]:
    """A server that answers by the script."""
    server = Server(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completion(text: Any) -> bytes:
    """The body of a chat completion."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def says(text: Any) -> Reply:
    """A proper answer."""
    return lambda handler: handler.send(completion(text))


def fails(status: int, **headers: str) -> Reply:
    """An HTTP error."""
    return lambda handler: handler.send(b'{"error": {"message": "on purpose"}}', status, **headers)


def raw(body: bytes) -> Reply:
    """Status 200 and any body."""
    return lambda handler: handler.send(body)


def cuts(text: str) -> Reply:
    """Half of an answer, then the connection is closed."""

    def reply(handler: Handler) -> None:
        body = completion(text)
        handler.send(body[: len(body) // 2], length=len(body))
        handler.close_connection = True

    return reply


def hangs_up(handler: Handler) -> None:
    """Nothing at all."""
    handler.close_connection = True


def waits(seconds: float, text: str = "") -> Reply:
    """A proper answer, late."""

    def reply(handler: Handler) -> None:
        time.sleep(seconds)
        handler.send(completion(text))

    return reply


def drips(seconds: float) -> Reply:
    """White space, a byte at a time: never silent for long, never done."""

    def reply(handler: Handler) -> None:
        handler.send(b"", length=10_000)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.02)
        handler.close_connection = True

    return reply
