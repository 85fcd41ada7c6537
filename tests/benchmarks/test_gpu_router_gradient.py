"""The GPU script without a GPU: all of it in a process of its own under the interpreter, and its parts one by one.

Times are never looked at. What only a GPU can do, events, profiler and hidden waits, is run with stand-ins.
"""

import csv
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    gpu_again,
    gpu_checks,
    gpu_figure,
    gpu_paths,
    gpu_prepare,
    gpu_report,
    gpu_router_gradient,
    gpu_timing,
)
from benchmarks.gpu_cases import ROUTERS, Router, make_call, whole_fields
from benchmarks.gpu_checks import Check, Outcome, checks, run_check, ugly_rows
from benchmarks.gpu_figure import Timing
from benchmarks.gpu_race import Launches, Race
from benchmarks.gpu_timing import Budget
from benchmarks.timing import Spread
from moe_routing import router_gradient
from moe_routing.kernels import BLOCKS

ROOT = Path(__file__).resolve().parents[2]
SMALL = Router("small", 12, 3, "softmax")
# Nothing but the base dependencies: any of these would be an ImportError.
ALONE = "import sys; sys.modules.update(dict.fromkeys(('trl', 'transformers', 'matplotlib', 'hypothesis')))"


COMPILED = """
from dataclasses import replace
import torch
from benchmarks.gpu_cases import Router, make_call
from benchmarks.gpu_paths import Compiled, eager
from benchmarks.gpu_timing import Budget

real = torch.compile
torch.compile = lambda function, **options: real(function, backend="aot_eager", **options)
compiled = Compiled(True, Budget(200))
for experts in (12, 20):
    for tokens in (64, 32, 96):
        call = make_call(Router("small", experts, 3, "softmax"), tokens, torch.float32, "cpu")
        call = replace(call, lambda_token=10.0)
        ready = compiled(call)
        assert ready is not None, compiled.problem
        torch.testing.assert_close(ready(call), eager(call), rtol=1e-5, atol=1e-5)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
"""


def in_python(code):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


def run_script(*arguments):
    return in_python(
        f"{ALONE}; from benchmarks.gpu_router_gradient import main; raise SystemExit(main({list(arguments)!r}))"
    )


def test_whole_script_under_the_interpreter_with_the_base_dependencies_alone(tmp_path):
    pytest.importorskip("triton")
    done = run_script("--device", "cpu", "--no-compile", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
    assert "times below show that the script runs, and nothing else" in done.stdout
    assert "without matplotlib" in done.stdout
    with (tmp_path / "router_gradient.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["router"] for row in rows} == {router.name for router in ROUTERS}
    assert {row["candidate"] for row in rows} == {"kernel", "copy", "eager"}
    assert (tmp_path / "router_gradient.png").read_bytes().startswith(b"\x89PNG")
    assert (
        (tmp_path / "router_gradient.md").read_text(encoding="utf-8").startswith("# Router-gradient kernel: on a GPU")
    )


def test_as_a_file_the_folder_above_is_on_the_path():
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_router_gradient.py", "--help"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": "src"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_router_gradient, "find_spec", lambda name: object())
    assert gpu_router_gradient.main([]) == 2
    assert "no GPU" in capsys.readouterr().out
    monkeypatch.setattr(gpu_router_gradient, "find_spec", lambda name: None)
    assert gpu_router_gradient.main([]) == 2
    assert "triton is not installed" in capsys.readouterr().out


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))


def found_by(spoil, **options):
    """What a check says of a gradient that differs from the reference by ``spoil``."""
    call = make_call(SMALL, 60, torch.float32, "cpu", holes=True, mean_field=8)

    def kernel(call, out):
        return out.copy_(spoil(gpu_paths.eager(call), call))

    return run_check(Check("spoiled", lambda: ugly_rows(call), **options), kernel, gpu_paths.eager)


def nudge(row, amount):
    def spoil(result, call):
        result = result.clone()
        result[row, 2] += amount
        return result

    return spoil


def test_a_right_gradient_passes_and_a_wrong_one_does_not():
    right = found_by(lambda result, call: result)
    assert right.problem == ""
    assert 0.1 < right.changed < 0.9
    call = make_call(SMALL, 60, torch.float32, "cpu", holes=True, mean_field=8)
    moved = int((call.field >= 0).nonzero()[1])
    alone = int((call.field < 0).nonzero()[0])
    assert found_by(nudge(moved, 1e-3)).problem == "error above its bound"
    assert found_by(nudge(alone, 1e-3)).problem == "a token without injection was changed"
    assert found_by(lambda result, call: call.grad_in).problem == "error above its bound"
    assert found_by(lambda result, call: result.nan_to_num()).problem == "a token without injection was changed"
    assert found_by(lambda result, call: torch.where(result == 0, 0.0, result)).problem != ""
    assert found_by(lambda result, call: result, still=True).problem == "changed"


def test_a_check_that_changes_nothing_is_no_check():
    call = replace(make_call(SMALL, 20, torch.float32, "cpu"), gate=0.0)
    found = run_check(Check("empty", lambda: call), lambda call, out: call.grad_in, gpu_paths.eager)
    assert "empty" in found.problem


def test_result_of_another_dtype_is_a_problem():
    call = make_call(SMALL, 20, torch.bfloat16, "cpu")
    found = run_check(Check("wide", lambda: call), lambda call, out: gpu_paths.eager(call.wide()), gpu_paths.eager)
    assert "float64" in found.problem


def test_reference_field_by_field_is_the_reference_of_all():
    call = make_call(SMALL, 300, torch.float64, "cpu", mean_field=7, holes=True)
    parts = list(whole_fields(call.field, 20))
    assert parts[0][0] == 0
    assert parts[-1][1] == 300
    assert 8 < len(parts) <= 15
    pieces = torch.cat([gpu_paths.eager(call.rows(*part)) for part in parts])
    torch.testing.assert_close(pieces, gpu_paths.eager(call), rtol=0, atol=0)
    assert list(whole_fields(call.field[:0], 20)) == [(0, 0)]
    assert list(whole_fields(torch.zeros(50, dtype=torch.long), 20)) == [(0, 50)]


def test_eager_is_the_public_function():
    call = make_call(SMALL, 40, torch.float32, "cpu", holes=True)
    expected = router_gradient(call.logits, call.grad_in, **call.keywords())
    torch.testing.assert_close(gpu_paths.eager(call), expected, rtol=0, atol=0)


def test_calls_have_close_pairs_and_strided_ones_hold_the_same_numbers():
    call = make_call(ROUTERS[0], 400, torch.float32, "cpu")
    off = replace(call, lambda_token=0.0)
    acting = (gpu_paths.eager(call) != gpu_paths.eager(off)).any(-1)
    assert float(acting.float().mean()) > 0.3
    for twist in (gpu_checks.apart, gpu_checks._unaligned):
        changed = twist(call)
        assert torch.equal(changed.logits, call.logits)
        assert torch.equal(changed.grad_in, call.grad_in)
    assert gpu_checks.apart(call).logits.stride() == (259, 2)
    assert gpu_checks._unaligned(call).logits.data_ptr() % 16 != 0


def test_floor_counts_two_readings_of_the_gradient_with_rho():
    call = make_call(ROUTERS[0], 100, torch.bfloat16, "cpu")
    table = call.control.numel() * 4
    once = 100 * (128 * 2 * 3 + 8 + 8 * 8) + table
    assert call.floor_bytes() == once + 100 * (128 * 2 + 8 + 8)
    assert replace(call, rho=False).floor_bytes() == once


def test_rows_far_down_are_compared_bit_for_bit(monkeypatch):
    monkeypatch.setattr(gpu_again, "ROUTERS", (SMALL, SMALL, Router("wide", 2**20, 2, "softmax")))

    def kernel(call):
        return call.grad_in.clone()

    class Wrong:
        def __call__(self, call):
            result = call.grad_in.clone()
            result[-1, 0] += call.size[0] > 4
            return result

    monkeypatch.setattr(gpu_again, "FAR", 2**22)
    assert gpu_again.beyond_int32(kernel, "cpu", period=2).problem == ""
    assert gpu_again.beyond_int32(Wrong(), "cpu", period=2).problem != ""


def test_a_replay_is_compared_with_a_new_call():
    """A graph that goes on with what it was captured with is noticed, be it the gradients or the weights."""

    def capture(call):
        found = call().clone()
        return found, lambda: found.copy_(call())

    assert gpu_again.replayed(gpu_paths.eager, capture, "cpu", tokens=64).problem == ""
    assert gpu_again.replayed(gpu_paths.eager, capture, "cpu", tokens=64).changed > 0.3
    stale = gpu_again.replayed(gpu_paths.eager, lambda call: (call(), lambda: None), "cpu", tokens=64)
    assert stale.problem == "a replay differs from a call"

    class Highest:
        """Keeps the highest norm of all calls, as memory does that no replay clears."""

        def __init__(self):
            self.norm, self.replays = 0.0, False

        def __call__(self, call):
            norm = float(call.grad_in.double().norm())
            self.norm = max(self.norm, norm)
            return call.grad_in * (norm / (self.norm if self.replays else norm))

    kernel = Highest()

    def as_captured(call):
        found = call().clone()

        def replay():
            kernel.replays = True
            found.copy_(call())
            kernel.replays = False

        return found, replay

    assert gpu_again.replayed(kernel, as_captured, "cpu", tokens=64).problem == "a replay differs from a call"


def test_full_list_of_checks_has_all_kinds():
    names = [check.name for check in checks("cpu", (1,), full=True)]
    for name in ("no token", "one field over all tokens", "closed gate on the device", "1024 experts", "in place"):
        assert name in names


def timings(rate):
    """Made-up figures in which the kernel takes ``rate`` of the copy's bandwidth at large sizes."""
    found = []
    for tokens in (1000, 10000, 100000):
        share = rate * min(tokens / 10000, 1)
        for name, seconds in (("kernel", 1e-3 / share), ("copy", 1e-3), ("eager", 6e-3 / share)):
            spread = Spread(*[tokens * 1e-5 * seconds] * 3)
            versus = Spread(*[seconds * share / 1e-3] * 3)
            found.append(Timing("small", 12, 3, "softmax", "float32", tokens, name, spread, tokens * 100, versus))
    return found


def test_aims_and_the_size_from_which_bandwidth_rules():
    launched = [
        Launches("kernel", "small", ["norms", "inject"], 1e-5, ""),
        Launches("eager", "small", ["a"] * 9, 1e-4, ""),
    ]
    good = gpu_report.aim_table(timings(0.9), launched)
    assert good.count("| met |") == 4
    assert "torch.compile / kernel | ≥ 1.3 | not measured" in good
    bad = gpu_report.aim_table(timings(0.5), [replace(launched[0], names=["a", "b", "c"], wait="item()")])
    assert bad.count("**missed**") == 3
    blind = gpu_report.aim_table(timings(0.9), [replace(launched[0], names=None)])
    assert "small, kernel: launches | ≤ 2 | not counted | |" in blind
    assert "small, kernel: waits for the GPU | none | none | met |" in blind
    assert "from 10000 tokens on" in gpu_report.where_bandwidth_rules(timings(0.9))
    assert "at none of the sizes up to 100000" in gpu_report.where_bandwidth_rules(timings(0.5))


def test_budget_names_what_it_leaves_out():
    budget = Budget(seconds=5)
    assert budget.allows("first", 1)
    assert not budget.allows("second", 6)
    assert budget.left_out == ["second"]


def without_kernel(monkeypatch, kernel=gpu_paths.eager):
    monkeypatch.setattr("benchmarks.gpu_race.kernel", kernel)
    monkeypatch.setattr("benchmarks.gpu_race.kernel_counting", lambda call: lambda: kernel(call))


def test_race_stops_when_time_is_up_and_survives_a_compiler_that_fails(monkeypatch):
    without_kernel(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *arguments, **keywords: 1 / 0)
    race = Race("cpu", Budget(60), with_compile=True)
    race.run((8, 4))
    assert race.compiled.problem == "ZeroDivisionError: division by zero"
    assert {timing.candidate for timing in race.timings} == {"kernel", "copy", "eager"}
    assert len({(t.router, t.dtype, t.tokens) for t in race.timings}) == 12
    assert all(row.names is None for row in race.launches)
    assert "ZeroDivisionError" in gpu_report.report("head", race, "drawn", "checks")
    late = Race("cpu", Budget(-1), with_compile=False)
    late.run((8, 4))
    assert not late.timings
    assert len(late.budget.left_out) == 12
    assert "Left out: Qwen3-30B-A3B, bfloat16, 8 tokens" in gpu_report.report("head", late, "drawn", "checks")


def test_race_refuses_a_kernel_that_is_wrong(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_race.kernel", lambda call: call.grad_in)
    race = Race("cpu", Budget(60), with_compile=False)
    race.run((8, 4))
    assert not race.timings
    assert len(race.problems) == 12
    assert race.problems[0].startswith("Qwen3-30B-A3B, bfloat16, 8 tokens: AssertionError: eager")
    assert f"**{race.problems[0]}**" in gpu_report.report("head", race, "drawn", "checks")


def test_one_size_that_fails_is_named_and_the_others_are_timed(monkeypatch):
    def breaks(call):
        if call.size[:2] == (4, 256):
            raise RuntimeError
        return gpu_paths.eager(call)

    without_kernel(monkeypatch, breaks)
    race = Race("cpu", Budget(60), with_compile=False)
    race.run((8, 4))
    assert len({(t.router, t.dtype, t.tokens) for t in race.timings}) == 10
    assert [problem.split(": ")[1] for problem in race.problems] == ["RuntimeError"] * 2


@pytest.fixture
def on_a_gpu(monkeypatch):
    """``main`` as on a GPU, with nothing compiled and little to check and to time, on the processor."""
    monkeypatch.setattr(gpu_router_gradient, "_cannot_run", lambda device: "")
    monkeypatch.setattr(gpu_router_gradient, "_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**36, 2**36))
    monkeypatch.setattr(gpu_router_gradient, "prepare", lambda *arguments, **options: "nothing to compile")
    few = [Check("few", lambda: make_call(SMALL, 20, torch.float32, "cpu")), Check("bad", lambda: 1 / 0)]
    monkeypatch.setattr(gpu_router_gradient, "checks", lambda *arguments, **options: few)
    monkeypatch.setattr(gpu_router_gradient, "kernel_into", lambda call, out: out.copy_(gpu_paths.eager(call)))
    without_kernel(monkeypatch)
    monkeypatch.setattr(gpu_router_gradient, "Race", lambda device, *rest, **options: Race("cpu", *rest, **options))
    monkeypatch.setattr(gpu_router_gradient, "TIMED", {"full": (8, 4)})
    monkeypatch.setattr(gpu_router_gradient, "beyond_int32", lambda kernel, device: few[0])
    monkeypatch.setattr(gpu_router_gradient, "replayed", lambda *arguments: Outcome("again", "", 0.0, 1.0, ""))


def test_what_fails_does_not_keep_the_rest_from_the_report(on_a_gpu, monkeypatch, tmp_path, capsys):
    def fails(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(gpu_router_gradient, "prepare", fails)
    monkeypatch.setattr(gpu_router_gradient, "beyond_int32", fails)
    assert gpu_router_gradient.main(["--no-compile", "--output", str(tmp_path)]) == 1
    assert "nothing was compiled ahead of time: MemoryError" in capsys.readouterr().out
    text = (tmp_path / "router_gradient.md").read_text(encoding="utf-8")
    for expected in (
        "4 checks against float64 before anything was timed, **2 failed**",
        "ZeroDivisionError: division by zero",
        "| beyond 2³¹ elements |  | nan | 0.00 | **MemoryError** |",
        "| Qwen3-Next | float32 | 8 | kernel |",
    ):
        assert expected in text


def test_a_run_without_time_for_a_single_figure_still_reports(on_a_gpu, tmp_path):
    gpu_router_gradient.main(["--seconds", "0", "--no-compile", "--output", str(tmp_path)])
    assert "missing: no times" in (tmp_path / "router_gradient.md").read_text(encoding="utf-8")


def test_compilations_leave_time_for_the_times(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    call = make_call(SMALL, 8, torch.float32, "cpu")
    early, late = Budget(100), Budget(100)
    late.began -= 60
    assert gpu_paths.Compiled(True, early)(call) is not None
    assert gpu_paths.Compiled(True, late)(call) is None
    assert late.left_out == ["torch.compile at 12 experts, torch.float32"]


def test_torch_compile_serves_all_sizes_with_one_graph():
    done = in_python(COMPILED)  # the import hook that checks types in this process is not for the compiler
    assert done.returncode == 0, done.stderr


def test_both_pictures_are_png(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    assert "matplotlib" in gpu_figure.draw(tmp_path / "a.png", timings(0.9), "title")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "kernel #0072B2" in gpu_figure.draw(tmp_path / "b.png", timings(0.9), "title")
    from matplotlib.image import imread

    for name in ("a.png", "b.png"):
        image = imread(tmp_path / name)
        assert image.ndim == 3
        assert len({tuple(pixel) for pixel in image[::2, ::2, :3].reshape(-1, 3).tolist()}) > 3


class Device:
    """A stand-in for ``torch.cuda`` that counts how it is used."""

    def __init__(self):
        self.now, self.mode, self.waits = 0.0, "default", 0

    def Event(self, enable_timing):
        assert enable_timing
        event = SimpleNamespace(at=None)

        def record():
            self.now += 1.0
            event.at = self.now

        event.record, event.elapsed_time = record, lambda other: other.at - event.at
        return event

    def synchronize(self):
        self.waits += 1

    def set_sync_debug_mode(self, mode):
        self.mode = mode


@pytest.fixture
def device(monkeypatch):
    device = Device()
    for name in ("Event", "synchronize", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    return device


def test_events_are_read_after_the_device_is_done(device):
    clock = gpu_timing.Clock("cpu")
    clock.on_gpu, clock.flush = True, torch.ones(3)
    order = []
    rounds = clock.rounds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0.0)
    assert rounds.seconds == {"a": (1e-3,) * 11, "b": (1e-3,) * 11}
    assert "".join(order).startswith("abab" + "ba" + "ab")
    assert device.waits == len(order) == 24
    assert not clock.flush.any()
    assert clock.host_seconds(lambda: None) < 1


def test_hidden_waits_are_named_and_the_mode_is_put_back(device):
    def waits():
        assert device.mode == "error"
        raise RuntimeError("called a synchronizing CUDA operation\nmore")

    assert gpu_timing.hidden_wait(waits) == "called a synchronizing CUDA operation"
    assert device.mode == "default"
    assert gpu_timing.hidden_wait(lambda: None) == ""


def test_launches_are_what_the_device_ran(device, monkeypatch):
    from torch.autograd import DeviceType

    events = [
        SimpleNamespace(name="aten::zeros", device_type=DeviceType.CPU),
        SimpleNamespace(name="Memset", device_type=DeviceType.CUDA, is_user_annotation=False),
        SimpleNamespace(name="Context Sync", device_type=DeviceType.CUDA),
        SimpleNamespace(name="_inject", device_type=DeviceType.CUDA),
        SimpleNamespace(name="region", device_type=DeviceType.CUDA, is_user_annotation=True),
    ]

    class Profile:
        def __init__(self, activities):
            assert len(activities) == 2

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def events(self):
            return events

    monkeypatch.setattr("torch.profiler.profile", Profile)
    assert gpu_timing.launches(lambda: None) == ["Memset", "_inject"]
    kernels = [event for event in events if event.name == "_inject"]
    tries = iter([[], events, kernels])
    monkeypatch.setattr(Profile, "events", lambda self: next(tries))
    assert gpu_timing.launches(lambda: None) == ["_inject"], "neither what was lost nor a fill for hundreds of calls"
    monkeypatch.setattr(Profile, "events", lambda self: events)
    events.clear()
    assert gpu_timing.launches(lambda: None) is None, "no event is no count of 0, which would meet every aim"


def test_sizes_that_do_not_fit_are_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    race = Race("cpu", Budget(60), with_compile=False)
    race.clock.on_gpu = True
    assert race._has_memory("small", 2**20)
    assert not race._has_memory("large", 2**26)
    assert race.budget.left_out == ["large: needs 4 GiB of memory"]
    budget = Budget(60)
    monkeypatch.setattr(gpu_router_gradient, "checks", lambda *arguments, **options: ())
    assert not list(gpu_router_gradient._outcomes("cpu", "full", budget))
    assert "beyond 2³¹ elements needs 32 GiB, 1 are free" in budget.left_out[0]


def test_every_check_is_compiled_ahead():
    pytest.importorskip("triton")
    listed = list(checks("cpu", (40,), full=False))
    found = gpu_prepare.jobs()
    assert {place for place, _ in found} == set(range(len(listed)))
    assert [number for place, number in found if place == 0] == list(range(len(BLOCKS)))
    assert len({check.number % len(BLOCKS) for check in listed if check.number is not None}) == len(BLOCKS)


AHEAD = """
import sys
from pathlib import Path
from benchmarks.gpu_prepare import compile_job, jobs, prepare

if __name__ == "__main__":
    job, cache = jobs()[-1], Path(sys.argv[1])
    print(prepare(90, [job], seconds=200))
    ahead = set(cache.iterdir())
    compile_job(job, 90)
    assert ahead and set(cache.iterdir()) == ahead, "compiled twice"
    assert prepare(90, [(10**6, 0)], seconds=200).endswith("1 failed")
"""


def test_a_launch_finds_what_was_compiled_ahead(tmp_path):
    pytest.importorskip("triton")
    script, cache = tmp_path / "ahead.py", tmp_path / "cache"
    script.write_text(AHEAD, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run([sys.executable, script, cache], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 compilations ahead of time" in done.stdout
