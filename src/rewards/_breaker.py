"""When to stop asking a server that does not answer."""

import threading
import time


class Breaker:
    """Opens after `limit` requests in a row without an answer; from then on one request a `pause` finds out.

    Args:
        limit: requests in a row, each with all its tries used up.
        pause: seconds without a request; 0 never opens.
        longest: seconds after which the outcome of the request that finds out is known.
    """

    def __init__(self, limit: int, pause: float, longest: float) -> None:
        self.limit, self.pause, self.longest = limit, pause, longest
        self.opened = threading.Event()
        self._lock = threading.Lock()
        self._silent, self._until = 0, 0.0

    def refuses(self) -> float:
        """Seconds until a request may be sent; 0 lets the caller's through."""
        with self._lock:
            left = self._until - time.monotonic()
            if not self.opened.is_set():
                return 0.0
            if left > 0:
                return left
            # A lease and no flag, so that a request that ends in an interrupt does not keep the breaker open for ever.
            self._until = time.monotonic() + self.longest + self.pause
            return 0.0

    def answered(self) -> None:
        """An exchange brought an answer, be it an error."""
        with self._lock:
            self._silent = 0
            self.opened.clear()

    def gave_up(self) -> None:
        """A request ended without an answer."""
        with self._lock:
            self._silent += 1
            if self._silent >= self.limit and self.pause > 0:
                self._until = time.monotonic() + self.pause
                self.opened.set()
