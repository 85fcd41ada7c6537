"""Memory that is handed out as zeros: no piece twice, whoever asks, and none to a captured graph."""

import contextlib
import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_routing import cleared, fused, survival
from moe_routing.sums import SumCount
from tests.moe_routing.test_mutants import mutate

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def span(piece):
    return range(piece.data_ptr(), piece.data_ptr() + 8 * piece.numel())


def check_pieces_are_zero_and_apart(module):
    """Hundreds of pieces of all sizes, each poisoned as soon as it is there, and all of them kept."""
    module.CHUNK = 300
    memory = module.Cleared()
    pieces = []
    for i in range(400):
        count = (7 * i) % 130 if i % 50 else 299 + i % 4
        piece = memory.take(count, CPU)
        assert piece.shape == (count,)
        assert piece.dtype == torch.float64
        assert not piece.any(), f"piece {i} held something"
        piece.fill_(float("nan"))
        pieces.append(piece)
    spans = sorted((span(piece) for piece in pieces if piece.numel()), key=lambda one: one.start)
    assert all(one.stop <= other.start for one, other in itertools.pairwise(spans))


def check_alignment(module):
    memory = module.Cleared()
    assert all(memory.take(count, CPU).data_ptr() % 16 == 0 for count in (1, 3, 2, 5, 1, 1))


def check_inference_mode(module):
    memory = module.Cleared()
    with torch.inference_mode():
        inside = memory.take(3, CPU)
    outside = memory.take(3, CPU)
    for piece in (inside, outside):
        assert not piece.is_inference(), "a piece that only inference may write to"
        piece += 1


def check_threads(module):
    """Everybody looks up the chunk before anybody says how much of it was taken, unless a lock forbids it."""

    class Slow(dict):
        def get(self, *arguments):
            time.sleep(0.001)  # else each would find what it left itself just now
            found = super().get(*arguments)
            time.sleep(0.001)
            return found

    memory, pieces = module.Cleared(), []
    memory._chunks = Slow()
    start = threading.Barrier(4)

    def work():
        start.wait()
        pieces.extend([memory.take(10, CPU) for _ in range(10)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({piece.data_ptr() for piece in pieces}) == 40, "two calls got one piece"


class Stand:
    """Stands in for a GPU with streams, one of which may be captured; its memory is the processor's."""

    def __init__(self, patch):
        self.stream, self.capturing, self.device, self.fills = 7, False, None, 0
        zeros = torch.zeros
        patch.setattr(torch.cuda, "device", self.on)
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=self.stream))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing and self.device == GPU)

        def fill(count, dtype, device):
            self.fills += 1
            return zeros(count, dtype=dtype)

        patch.setattr(torch, "zeros", fill)

    @contextlib.contextmanager
    def on(self, device):
        self.device = device
        yield
        self.device = None


def check_streams(module):
    """The fill of a chunk is ordered before the work of its own stream only."""
    with pytest.MonkeyPatch.context() as patch:
        gpu, memory = Stand(patch), module.Cleared()
        first, same = memory.take(4, GPU), memory.take(4, GPU)
        assert same.data_ptr() == first.data_ptr() + 32
        gpu.stream = 8
        assert memory.take(4, GPU)._base is not first._base, "another stream got a piece that it does not wait for"
        assert gpu.fills == 2
        gpu.stream = 7
        assert memory.take(4, GPU).data_ptr() == first.data_ptr() + 64
        assert memory.take(4, torch.device("cuda", 1))._base is not first._base
        assert gpu.fills == 3


def check_captures(module):
    """A replay must repeat the fill, and what is filled inside belongs to the graph."""
    with pytest.MonkeyPatch.context() as patch:
        gpu, memory = Stand(patch), module.Cleared()
        before = memory.take(4, GPU)
        gpu.capturing = True
        pieces = [memory.take(4, GPU) for _ in range(2)]
        assert gpu.fills == 3, "a captured call got a piece that no replay clears"
        assert all(piece._base is None for piece in pieces)
        gpu.capturing = False
        assert memory.take(4, GPU).data_ptr() == before.data_ptr() + 32
        assert gpu.fills == 3


CHECKS = (
    check_pieces_are_zero_and_apart,
    check_alignment,
    check_inference_mode,
    check_threads,
    check_streams,
    check_captures,
)
MUTANTS = {
    "a piece is handed out twice": ("= chunk, start + room", "= chunk, start"),
    "half of it is handed out twice": ("= chunk, start + room", "= chunk, start + room // 2"),
    "pieces reach over the end": ("chunk is None or start + room > CHUNK", "chunk is None or start > CHUNK"),
    "a large one comes from a chunk": ("place is None or room > CHUNK", "place is None"),
    "pieces are not aligned": ("-(-count // ALIGNED) * ALIGNED", "count"),
    "streams share a chunk": ("(device, torch.cuda.current_stream().cuda_stream)", "device"),
    "a captured call gets a piece": ("None if torch.cuda.is_current_stream_capturing() else ", ""),
    "another device is asked about captures": ("with torch.cuda.device(device):", "if True:"),
    "inference mode poisons a chunk": ("with torch.inference_mode(False):", "if True:"),
    "nothing is locked": ("with self._lock:", "if True:"),
    "the memory is not cleared": ("torch.zeros(count, ", "torch.full((count,), 1.0, "),
}


@pytest.mark.parametrize("check", CHECKS)
def test_pieces(check):
    check(mutate("cleared", "import torch\n", "import torch \n"))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name):
    broken = mutate("cleared", *MUTANTS[name])
    for check in CHECKS:
        try:
            check(broken)
        except (AssertionError, RuntimeError):  # an inference tensor raises
            return
    pytest.fail(f"the checks let '{name}' pass")


def test_one_fill_serves_hundreds_of_calls():
    memory = cleared.Cleared()
    memory.take(200, CPU)
    with Names() as seen:
        for _ in range(600):
            memory.take(200, CPU)
    assert set(seen.names) == {"slice"}


def test_a_call_that_fails_gives_no_piece_back(monkeypatch):
    """What it launched may have written there."""
    spoiled = []

    class Fails:
        def __getitem__(self, grid):
            def launch(gradient, field, norm, highest, *rest, **constants):
                highest.fill_(-1)
                spoiled.append(highest.data_ptr())
                raise KeyboardInterrupt

            return launch

    monkeypatch.setattr(fused, "kernels", lambda: SimpleNamespace(norms=Fails(), inject=Fails(), interpreted=True))
    rows, ids = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.long)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            fused.fused_router_gradient(rows, rows, ids[:, 0], rows, ids, 1)
    assert len(set(spoiled)) == 3
    assert not fused._CLEARED.take(64, CPU).any()


def test_survival_of_devices_and_streams_is_added_up_once(monkeypatch):
    total = survival.SurvivalTotal()
    assert total.collect() is None
    total(SumCount(torch.tensor(1.0), torch.tensor(2.0)))
    gpu = Stand(monkeypatch)
    places = []
    for stream in (7, 7, 8):
        gpu.stream = stream
        memory = total.sums(GPU)
        memory[2:4] += torch.tensor([0.5, 1.0])
        places.append(memory.data_ptr())
    assert places[0] == places[1] != places[2]
    found = total.collect()
    assert (found.total.item(), found.count.item()) == (2.5, 5.0)
    assert total.collect() is None
    assert total.sums(GPU).data_ptr() not in places, "a late launch would add to the next sum"
    gpu.capturing = True
    assert total.sums(GPU) is None
