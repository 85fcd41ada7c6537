"""Memory that holds zeros already: one fill serves the small buffers of many calls."""

import threading
from collections.abc import Hashable

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK = 1 << 17  # float64 numbers, 1 MiB: hundreds of routers between two fills
ALIGNED = 2  # numbers in 16 bytes, the widest access of a kernel


class Cleared:
    """Hands out pieces of chunks that were filled with zeros; no piece is handed out twice.

    One chunk is held for each device and stream, and stays. Work that is queued on the stream that was current for
    :meth:`take` finds zeros; other streams do not wait for the fill.

    >>> cleared = Cleared()
    >>> first, second = cleared.take(3, torch.device("cpu")), cleared.take(3, torch.device("cpu"))
    >>> first.fill_(7.0), second
    (tensor([7., 7., 7.], dtype=torch.float64), tensor([0., 0., 0.], dtype=torch.float64))
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: dict[Hashable, tuple[Tensor, int]] = {}

    def take(self, count: int, device: torch.device) -> Float[Tensor, " count"]:
        """``count`` zeros in float64 for the current stream of ``device``, aligned to 16 bytes.

        More than a chunk holds get a fill of their own. So does every piece while a CUDA graph is captured: a replay
        repeats the fills that it captured, and would find a piece of an older chunk as the last one left it.
        """
        room = -(-count // ALIGNED) * ALIGNED
        place = place_of(device)
        if place is None or room > CHUNK:
            return _zeros(count, device)
        with self._lock:
            chunk, start = self._chunks.get(place, (None, 0))
            if chunk is None or start + room > CHUNK:
                chunk, start = _zeros(CHUNK, device), 0
            # Before the piece exists: whatever is raised from here on, it belongs to this call.
            self._chunks[place] = chunk, start + room
            return chunk[start : start + count]


def place_of(device: torch.device) -> Hashable | None:
    """The device and its current stream; None while that one is captured in a CUDA graph."""
    if device.type != "cuda":
        return device
    with torch.cuda.device(device):  # it is the current device that is asked about captures
        return None if torch.cuda.is_current_stream_capturing() else (device, torch.cuda.current_stream().cuda_stream)


def _zeros(count: int, device: torch.device) -> Tensor:
    # A tensor made in inference mode could not be written to outside of it, nor could any piece.
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.float64, device=device)
