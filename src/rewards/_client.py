"""The HTTP client of an endpoint, with the proxies that the environment names."""

import os
from typing import Any

_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})


def make_client(timeout: float, keepalive: int) -> Any:
    """A client of httpx2; a proxy variable that it cannot use is the caller's error and named."""
    try:
        import httpx2
    except ImportError as error:
        raise ImportError("asking an endpoint needs httpx2: pip install httpx2") from error
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=keepalive)
    try:
        return httpx2.Client(timeout=timeout, limits=limits)
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        proxies = [name for name in sorted(os.environ) if name.lower() in _PROXIES]
        raise ValueError(f"{', '.join(proxies) or 'proxy'}: {error}") from error
