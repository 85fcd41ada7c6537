"""Turns, fields and operations read from the tokens of a TRL batch."""

import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import moe_routing as mr
from moe_routing import FieldKind, OperationRules, tool_call_names
from moe_routing.adapters.transformers import RoutingControl
from moe_routing.adapters.trl import CODE_BLOCK, TOOL_CALL_BLOCK, TurnRouting, split_turn
from tests.moe_routing.adapters.tiny_families import tiny_model

BLOCK = re.compile(TOOL_CALL_BLOCK, re.DOTALL)
READ = '<tool_call>{"name": "read_file", "arguments": {}}</tool_call>'
DELETE = '<tool_call>{"name": "delete_file", "arguments": {}}</tool_call>'


class Bytes:
    """A tokenizer of ``size`` bytes a token: tags are many tokens, and characters may lie across tokens."""

    def __init__(self, size=1):
        self.size = size
        self.pieces = []

    def __call__(self, text):
        raw = text.encode()
        ids = range(len(self.pieces), len(self.pieces) + -(-len(raw) // self.size))
        self.pieces += [raw[i : i + self.size] for i in range(0, len(raw), self.size)]
        return list(ids)

    def decode(self, ids, **options):
        assert options in ({}, {"skip_special_tokens": False, "clean_up_tokenization_spaces": False})
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


class BytesOneByOne(Bytes):
    """Every byte of an unfinished character becomes a replacement character of its own."""

    def decode(self, ids, **options):
        raw = b"".join(self.pieces[i] for i in ids)
        for cut in range(4):
            try:
                return raw[: len(raw) - cut].decode() + "\ufffd" * cut
            except UnicodeDecodeError:
                continue
        raise AssertionError(raw)


@pytest.mark.parametrize("tokenizer", [Bytes(1), Bytes(3), Bytes(7), BytesOneByOne(1), BytesOneByOne(3)])
@pytest.mark.parametrize(
    "text",
    [
        f"I look. {READ} and {DELETE}<|im_end|>",
        f"Für Ålesund 😀{READ}😀",
        f"{READ}\n{DELETE}",
        'cut off <tool_call>{"name": "re',
        f"<think>maybe {DELETE}</think>{READ}.",
        f"maybe {DELETE}</think>{READ}.",
    ],
)
def test_tokens_of_blocks(tokenizer, text):
    ids = tokenizer(text)
    tool, _ = split_turn(ids, tokenizer.decode, BLOCK)
    # Byte by byte: a token is TOOL when a byte of it lies in a block outside the reasoning.
    reasoning = text.find("</think>") + len("</think>") if "</think>" in text else 0
    inside = [False] * len(text.encode())
    for found in BLOCK.finditer(text, reasoning):
        first, last = (len(text[:at].encode()) for at in found.span())
        inside[first:last] = [True] * (last - first)
    want = [any(inside[i : i + tokenizer.size]) for i in range(0, len(inside), tokenizer.size)]
    assert tool.tolist() == want


@pytest.mark.parametrize(
    "text", ["", "no call", f"<think>{READ}", f"<think>{READ}</think> none", f"{READ}</think> none"]
)
def test_a_turn_without_calls(text):
    tokenizer = Bytes(2)
    tool, calls = split_turn(tokenizer(text), tokenizer.decode, BLOCK)
    assert calls is None
    assert not tool.any()


@pytest.mark.parametrize(
    "quoted", ["echo </tool_call> x", "<think> y", "</think>", "<think>a</think>", r"\"</tool_call>"]
)
@pytest.mark.parametrize("before", ["", '<think>a "<tool_call>" block</think>', "hm, a <tool_call> then</think>"])
def test_tags_inside_an_argument_are_text(before, quoted):
    tokenizer, call = Bytes(1), f'<tool_call>{{"name": "write_file", "arguments": {{"s": "{quoted}"}}}}</tool_call>'
    text = f"{before}First {call} and {READ} end"
    tool, calls = split_turn(tokenizer(text), tokenizer.decode, BLOCK)
    assert "".join(c for c, inside in zip(text, tool.tolist(), strict=True) if inside) == call + READ
    assert OperationRules.tool_calls()(calls) == ("create", "read")
    assert tool_call_names(f"{before if before[:1] == '<' else ''}{call}") == ["write_file"]


@pytest.fixture
def model():
    return tiny_model("qwen3_moe")


@pytest.fixture
def control(model):
    with RoutingControl(model) as control:
        yield control


def batch(tokenizer, *rows):
    """Token ids and turns of rows of ``(own, text)`` pieces, padded with a token of its own."""
    ids, turns = [], []
    for row in rows:
        ids.append([])
        turns.append([])
        for number, (own, text) in enumerate(row):
            piece = tokenizer(text)
            ids[-1] += piece
            turns[-1] += [number // 2 if own else -1] * len(piece)
    width, (padding,) = max(map(len, ids)) + 1, tokenizer("!")
    ids = [row + [padding] * (width - len(row)) for row in ids]
    return torch.tensor(ids), torch.tensor([row + [-1] * (width - len(row)) for row in turns])


def test_fields_and_operations(control):
    tokenizer, routing = Bytes(), TurnRouting(control)
    ids, turn = batch(
        tokenizer,
        [(1, "so " + READ), (0, f"result {DELETE}"), (1, f"then {DELETE}{READ} now"), (0, "ok"), (1, "Done.")],
        [(1, "Nothing.")],
        [(1, DELETE)],
    )
    field = routing.label(ids, turn, tokenizer)
    assert torch.equal(field >= 0, turn >= 0)
    T, H = int(FieldKind.TOOL), int(FieldKind.THINK)
    assert routing._kind.tolist() == [H, T, H, T, H, H, T]
    operations = routing.rules.operations
    named = [{operations[i] for i in row.nonzero().flatten().tolist()} for row in routing._labels]
    assert named == [{"read"}, {"read"}, {"read", "delete"}, {"read", "delete"}, set(), set(), {"delete"}]
    assert field[2, 0] == 6  # a turn that is one call has no THINK field
    text = [tokenizer.decode(ids[field == f].tolist()) for f in range(7)]
    assert text == ["so ", READ, "then  now", DELETE + READ, "Done.", "Nothing.", DELETE]


def test_code(control):
    routing = TurnRouting(control, OperationRules.appworld(), block=CODE_BLOCK)
    tokenizer, code = Bytes(3), "```python\nprint(apis.gmail.delete_thread(1))\n```"
    ids, turn = batch(
        tokenizer, [(1, f"I do apis.gmail.show_thread() not.\n{code}")], [(1, "apis.gmail.show_thread()")]
    )
    routing.label(ids, turn, tokenizer)
    assert routing.rules.operations[1] == "create"
    assert routing._labels.sum().item() == 2  # both fields of the first turn
    assert routing._labels[:2, routing.rules.operations.index("delete")].all()


def test_a_batch_without_generated_tokens(control):
    tokenizer, routing = Bytes(), TurnRouting(control)
    ids, turn = batch(tokenizer, [(0, "prompt")], [(0, "result")])
    field = routing.label(ids, turn, tokenizer)
    assert (field == -1).all()
    model = tiny_model("qwen3_moe")
    routing = TurnRouting(RoutingControl(model))
    field = routing.label(ids, turn, tokenizer)
    with torch.no_grad(), routing.record(field):
        model(input_ids=ids.clamp(max=9))
    routing.close(torch.full(ids.shape, float("nan")), field)
    with routing.bind(field, scale=1.0):
        model(input_ids=ids.clamp(max=9)).last_hidden_state.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    logged = routing.metrics()
    assert logged["routing/pairs"] == 0
    assert logged["routing/gate"] == 0.0
    assert math.isnan(logged["routing/gate_entropy"])


@pytest.fixture
def four_ranks():
    """This process as rank 0 of four, the others of which only seem to be there."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("ranks", "share"), [(None, 1.0), ([0, 1, 2, 3], 1.0), ([0, 1], 0.5), ([0], 0.25)])
def test_groups_of_ranks_with_an_objective_each_share_the_weight(model, control, four_ranks, monkeypatch, ranks, share):
    """The trainer averages over all ranks, so what each group adds must count by its share of them."""
    tokenizer, scales = Bytes(), []
    group = None if ranks is None else torch.distributed.new_group(ranks)
    routing = TurnRouting(control, process_group=group)
    ids, turn = batch(tokenizer, [(1, READ)])
    field = routing.label(ids, turn, tokenizer)
    with torch.no_grad(), routing.record(field):
        model(input_ids=ids % 40)
    routing.close(torch.ones(ids.shape), field)
    monkeypatch.setattr(control, "bind", lambda field, tables, *, scale: nullcontext(scales.append(scale)))
    routing.bind(field, scale=8.0)
    assert scales == [8.0 * share]


def expected_selection(sites, outputs, field, labels, row, kind):
    """What is logged of expert selection, from the primitives on each router's own output for the whole batch."""
    inside, owner = field >= 0, torch.where(field >= 0, row, -1)
    means = {}
    for site, output in zip(sites, outputs, strict=True):
        probs = mr.router_probs(output[0], site.activation)
        experts, chosen = probs.shape[1], output[2]
        counts = mr.expert_counts(chosen, field, len(labels), experts)
        layer = {
            "jaccard": mr.SumCount.of(*mr.jaccard_similarity(chosen, field)).compute(),
            "mean_shift": chosen.shape[1] * mr.SumCount.of(*mr.expert_set_gap(chosen, field)).compute(),
            "load_cv": mr.load_cv(chosen, owner, experts).mean(),
            "router_entropy": mr.router_entropy(probs, inside),
            "specialization_gap_think": mr.specialization_gap(counts, labels, kind == FieldKind.THINK),
            "specialization_gap_tool": mr.specialization_gap(counts, labels, kind == FieldKind.TOOL),
        }
        for name, value in layer.items():
            means[name] = means.get(name, 0.0) + float(value) / len(sites)
    return means


def test_logged_selection_is_that_of_the_primitives(tmp_path):
    """Read off micro-batches of one row each; two batches make a report."""
    model, tokenizer = tiny_model("qwen3_moe"), Bytes(2)
    first, second = [(1, "so I " + READ), (0, "x"), (1, DELETE)], [(1, "and then " + DELETE + READ)]
    rows = [first, second, [(1, "Nothing.")], [(1, READ)]]
    ids, turn = batch(tokenizer, *rows)
    tokens, seen = ids % 40, {}
    with RoutingControl(model) as control:
        routing = TurnRouting(control)
        history = []
        for step in range(2):
            field = routing.label(ids.roll(step, 0), turn.roll(step, 0), tokenizer)
            for row in range(len(ids)):
                with torch.no_grad(), routing.record(field[row, None]):
                    model(input_ids=tokens.roll(step, 0)[row, None])
            routing.close(torch.ones(ids.shape), field)
            history.append({"step": step + 1, **routing.metrics()})
        for layer, site in enumerate(control.routers):
            site.module.register_forward_hook(lambda m, a, output, layer=layer: seen.update({layer: output}))
        with torch.no_grad():
            model(input_ids=tokens.roll(1, 0))
    row = torch.arange(len(ids))[:, None].expand(ids.shape).flatten()
    outputs = [seen[layer] for layer in range(len(control.routers))]
    want = expected_selection(control.routers, outputs, field.flatten(), routing._labels, row, routing._kind)
    for name, value in want.items():
        assert value != 0, name
        assert history[1][f"routing/{name}"] == pytest.approx(value, rel=1e-5), name
    page = tmp_path / "report.html"
    numbers = mr.routing_report(routing.summaries, routing.rules.operations, history, html=page)
    assert numbers["routing/last/jaccard"] == numbers["routing/jaccard"] == history[1]["routing/jaccard"]
    assert numbers["routing/first/load_cv"] == history[0]["routing/load_cv"]


def test_a_new_batch_forgets_the_last():
    """Also one that was given up midway, as after an error in its forwards."""
    model, tokenizer = tiny_model("qwen3_moe"), Bytes(3)
    ids, turn = batch(tokenizer, [(1, READ)], [(1, DELETE)])
    with RoutingControl(model) as control:
        routing = TurnRouting(control)
        for rows in ([0, 1], [0], [1, 0]):
            field = routing.label(ids[rows], turn[rows], tokenizer)
            with pytest.raises(RuntimeError, match="was not closed"):
                routing.bind(field, scale=1.0)
            with torch.no_grad(), routing.record(field):
                model(input_ids=ids[rows] % 40)
            if len(rows) == 2:
                routing.close(torch.ones(field.shape), field)
                assert routing.metrics()["routing/turns_tool"] == 2


def test_order_and_shapes_are_checked(control):
    routing = TurnRouting(control)
    with pytest.raises(RuntimeError, match="was not closed"):
        routing.bind(torch.zeros(1, 1, dtype=torch.long), scale=1.0)
    with pytest.raises(Exception, match=r"turn"):
        routing.label(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long), SimpleNamespace())
