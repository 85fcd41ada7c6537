"""The token-credit view: what it says about a rollout, and that nothing in a rollout can act on the screen."""

import io
import math
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from credit.segments import Owner
from credit.view import (
    TokenCredit,
    batch_token_credit,
    byte_level_bytes,
    print_credit,
    render_html,
    token_credit,
    write_html,
)
from credit.view.tables import conflicts, findings, masked, opposed, runs, totals
from credit.view.text import as_text, visible

NAN = math.nan


def conflict_case() -> TokenCredit:
    return token_credit(
        ["<tool_call>", "x", " env", "A", "ns", "<pad>"],
        segments=[0, 0, -1, 1, 1, -1],
        advantages={"GRPO": [-0.5, -0.5, -0.5, -0.5, -0.5, 0.0], "SLCA": [1.5, 1.5, NAN, -1.0, -1.0, NAN]},
        mask=[1, 1, 0, 1, 1, 0],
        completion_mask=[1, 1, 1, 1, 1, 0],
        prompt=["hi"],
        rewards={"tool": 1.0, "summary": 0.0},
        peers={"tool": [0.0, 0.0, None], "summary": [1.0, 1.0, 0.5]},
        component_advantages={"tool": 1.5, "summary": -1.0},
        title="case",
    )


def printed(view: TokenCredit, **kwargs: int) -> str:
    out = io.StringIO()
    print_credit(view, Console(file=out, width=120, no_color=True), **kwargs)
    return out.getvalue()


class Reader(HTMLParser):
    """Tags in order, attributes, and the text of tokens; fails on unbalanced markup."""

    VOID = frozenset({"meta", "input", "rect", "circle", "path"})
    OPTIONAL = frozenset({"th", "td"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tokens: list[str] = []
        self.in_token = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID | self.OPTIONAL:
            self.stack.append(tag)
        if tag == "span" and ("class", "t") in attrs:
            self.in_token = True
            self.tokens.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID | self.OPTIONAL:
            return
        assert self.stack.pop() == tag
        self.in_token = self.in_token and tag != "span"

    def handle_data(self, data: str) -> None:
        if self.in_token:
            self.tokens[-1] += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.stack == []
    return reader


# What the view says.


def test_reasons_in_order_of_precedence():
    view = token_credit(
        list("abcdef"),
        segments=[0, 0, -1, -1, 1, -1],
        advantages=[0.0] * 6,
        mask=[1, 1, 0, 1, 1, 0],
        completion_mask=[1, 1, 1, 1, 1, 0],
        reasons=["", "cut by hand", "", "", "", ""],
        absent={1},
        prompt=["p"],
    )
    assert view.reasons == (
        "prompt", "", "cut by hand", "environment", "no segment", "absent from group", "padding",
    )  # fmt: skip


def test_without_a_completion_mask_environment_and_padding_are_not_told_apart():
    assert token_credit(["a", "b"], segments=[0, -1], advantages=[1, 0]).reasons == ("", "outside the mask")


def test_one_advantage_a_row_is_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"advantages\['GRPO'\] has shape \(2,\), but segments asks for \(2, 1\)"):
        batch_token_credit(
            [["a"], ["b"]], segments=torch.tensor([[1], [1]]), advantages={"GRPO": torch.tensor([1.0, -1.0])}
        )


@pytest.mark.parametrize("reason", ["truncated", "aborted"])
def test_a_dropped_row_says_why_even_when_its_masks_were_emptied(reason):
    kept = token_credit(
        list("abc"), segments=[0, -1, -1], advantages=[1, 0, 0], mask=[1, 0, 0], completion_mask=[1, 1, 0],
        row_reason=reason,
    )  # fmt: skip
    assert kept.reasons == (reason, "environment", "padding")
    emptied = token_credit(
        list("abc"), segments=[-1] * 3, advantages=[0] * 3, mask=[0] * 3, completion_mask=[0] * 3,
        row_reason=reason,
    )  # fmt: skip
    assert emptied.reasons == (reason,) * 3


def test_totals_are_sums_divided_once():
    view = conflict_case()
    by_rule = {rule: {t.segment: t for t in totals(view, rule)} for rule in view.advantages}
    tool, summary = by_rule["SLCA"][0], by_rule["SLCA"][1]
    assert (tool.tokens, tool.mean, tool.total, tool.share) == (2, 1.5, 3.0, 0.6)
    assert (summary.tokens, summary.mean, summary.total, summary.share) == (2, -1.0, -2.0, 0.4)
    assert by_rule["GRPO"][0].share == by_rule["GRPO"][1].share == 0.5
    assert dict(masked(view)) == {"prompt": 1, "environment": 1, "padding": 1}


def test_conflict_is_found_on_the_segment_where_the_signs_differ():
    view = conflict_case()
    (found,) = conflicts(view)
    assert (found.segment, found.tokens, found.first_mean, found.second_mean) == (0, 2, -0.5, 1.5)
    assert opposed(view) == (False, True, True, False, False, False, False)
    assert any(f.level == "conflict" and "2 tool tokens" in f.text for f in findings(view))


def test_nan_under_the_mask_is_silent_and_nan_on_a_trained_token_is_loud():
    assert not [f for f in findings(conflict_case()) if f.level == "error"]
    view = token_credit(["a", "b", "c"], segments=[0, 0, 1], advantages=[1.0, NAN, math.inf])
    (error,) = [f for f in findings(view) if f.level == "error"]
    assert "2 trained tokens" in error.text
    assert "token 1" in error.text
    assert view.scale == 1.0
    tool, summary = totals(view, "advantage")
    assert (tool.mean, tool.broken) == (1.0, 1)
    assert math.isnan(summary.mean)
    assert "NaN or infinity" in printed(view)
    page = render_html(view)
    assert 'class="error"' in page
    assert "var(--nan)" in page


def test_rows_that_teach_nothing_say_so_and_say_why():
    view = token_credit(
        ["a"], segments=[0], advantages=[0.0], rewards={"tool": 3.3, "lone": 1.0, "gone": None},
        peers={"tool": [3.3, 3.3], "lone": [None]},
    )  # fmt: skip
    text = " / ".join(f.text for f in findings(view))
    assert "teaches nothing" in text
    assert "tool is the same in the whole group" in text
    assert "lone: no present peer" in text
    assert "gone is absent" in text


def test_policy_tokens_without_a_segment_and_credit_under_a_mask_are_reported():
    view = token_credit(["a", "b"], segments=[-1, -1], mask=[1, 0], advantages=[0.0, 2.0])
    levels = {f.level: f.text for f in findings(view)}
    assert "1 policy token in no segment" in levels["warning"]
    assert any("1 masked token with an advantage" in f.text for f in findings(view))


@given(st.lists(st.tuples(st.integers(-1, 2), st.booleans(), st.floats(-9, 9) | st.just(NAN)), max_size=30))
@settings(max_examples=50, deadline=None)
def test_runs_partition_the_tokens_and_shares_sum_to_one(rows):
    view = token_credit(
        ["x"] * len(rows), segments=[s for s, _, _ in rows], mask=[m for _, m, _ in rows],
        advantages=[a for _, _, a in rows],
    )  # fmt: skip
    found = runs(view)
    assert [t for r in found for t in range(r.start, r.stop)] == list(range(len(rows)))
    assert all(len({view.reasons[t] for t in range(r.start, r.stop)}) == 1 for r in found)
    assert all((a.segment, a.reason) != (b.segment, b.reason) for a, b in pairwise(found))
    whole = totals(view, "advantage")
    assert sum(t.tokens for t in whole) == sum(view.trained)
    share = sum(t.share for t in whole)
    assert share == pytest.approx(1.0) if any(t.absolute for t in whole) else share == 0
    assert read(render_html(view)).tokens == ["x"] * len(rows)


# Text: visible and harmless.


def test_invisible_and_hostile_characters_become_marks():
    shown = {token: "".join(p.text for p in visible(token)) for token in ["\u202e", "\u200b", "\x1b[31m", "\ufeff"]}
    assert shown == {"\u202e": "⟨U+202E⟩", "\u200b": "⟨U+200B⟩", "\x1b[31m": "⟨U+001B⟩[31m", "\ufeff": "⟨U+FEFF⟩"}
    assert "".join(p.text for p in visible(" \t\r\n")) == "·⇥␍⏎\n"
    assert visible("\u0301")[0].text == "◌\u0301"
    assert visible("") == []


@given(st.binary(max_size=12))
@settings(max_examples=50, deadline=None)
def test_no_byte_is_lost(data):
    assert as_text(data).encode("utf-8", "surrogateescape") == data
    text = "".join(p.text for p in visible(data))
    text.encode("utf-8")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", text)


@given(st.text(max_size=8), st.text(max_size=8))
@settings(max_examples=50, deadline=None)
def test_nothing_in_a_rollout_adds_markup(token, title):
    view = token_credit(
        [token], segments=[0], advantages={title: [1.0]}, title=title, note=title, rewards={title: 1.0},
        reasons=[title],
    )  # fmt: skip
    plain = token_credit(
        ["x"], segments=[0], advantages={"x": [1.0]}, title="x", note="x", rewards={"x": 1.0},
        reasons=["x" if title else ""],
    )  # fmt: skip
    kept = [tag for tag in read(render_html(view)).tags if tag not in {"i", "p", "li", "ul", "b"}]
    wanted = [tag for tag in read(render_html(plain)).tags if tag not in {"i", "p", "li", "ul", "b"}]
    assert kept == wanted
    printed(view)


def test_hostile_tokens_are_shown_and_do_not_run():
    hostile = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "[bold]x[/bold]", "\x1b]0;owned\x07"]
    view = token_credit(hostile, segments=[0] * 4, advantages=[1.0] * 4, title=hostile[1], note=hostile[0])
    page = render_html([view, view])
    reader = read(page)
    assert reader.tokens[0] == hostile[0]
    assert not {"script", "img", "link", "iframe"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name == "src"]
    assert "\x1b" not in page + printed(view)
    assert "[bold]x[/bold]" in printed(view)


def test_the_page_needs_nothing_from_outside():
    page = render_html(conflict_case())
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme:dark" in page


def test_byte_level_pieces_that_are_half_a_character_show_their_bytes():
    halves = byte_level_bytes(["âĤ", "¬", "Ġx", "<|im_end|>", "日"])
    assert halves == [b"\xe2\x82", b"\xac", b" x", b"<|im_end|>", "日".encode()]
    reader = read(render_html(token_credit(halves, segments=[0] * 5, advantages=[1.0] * 5)))
    assert reader.tokens == ["\\xe2\\x82", "\\xac", "·x", "<|im_end|>", "日"]


# Building and showing.


def test_ids_with_decode_and_tensors():
    view = token_credit(
        torch.tensor([3, 1]), decode=lambda i: f"t{i}", segments=torch.tensor([0, 1]),
        advantages=torch.tensor([0.5, -0.5], dtype=torch.bfloat16, requires_grad=True),
        mask=torch.tensor([True, True]),
    )  # fmt: skip
    assert view.tokens == ("t3", "t1")
    assert view.advantages == {"advantage": (0.5, -0.5)}


def test_other_segment_enums_and_unknown_values_are_named():
    view = token_credit(["a", "b", "c"], segments=[0, 1, 7], advantages=[1, 1, 1], segment_type=Owner)
    text = printed(view)
    assert "controller" in text
    assert "expert" in text
    assert "segment 7" in text


def test_a_batch_shows_each_row_beside_its_group():
    views = batch_token_credit(
        [["a"], ["b"], ["c"]],
        segments=torch.tensor([[0], [0], [1]]),
        advantages={"SLCA": torch.tensor([[1.0], [-1.0], [0.0]])},
        rewards={"tool": torch.tensor([1.0, 0.0, NAN])},
        group=torch.tensor([9, 4, 9]),
        component_advantages={"tool": torch.tensor([1.0, -1.0, 0.0])},
        per_row={"title": ["x", "y", "z"], "prompt": [["p"], [], []]},
        rows=[0, 2],
    )
    assert [v.title for v in views] == ["x", "z"]
    assert math.isnan(views[0].peers["tool"][0])
    assert views[1].peers["tool"] == (1.0,)
    assert views[0].tokens == ("p", "a")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"segments": [0]}, "segments has 1 tokens"),
        ({"advantages": {"SLCA": [0.0]}}, r"advantages\['SLCA'\] has 1 tokens"),
        ({"mask": [1]}, "mask has 1 tokens"),
        ({"completion_mask": []}, "completion_mask has 0 tokens"),
        ({"reasons": ["x"]}, "reasons has 1 tokens"),
    ],
)
def test_another_length_is_an_error_that_names_the_argument(change, name):
    arguments = {"segments": [0, 0], "advantages": [1.0, 1.0]} | change
    with pytest.raises(ValueError, match=f"{name}, tokens has 2"):
        token_credit(["a", "b"], **arguments)


def test_bad_batches_and_ids_without_decode_are_errors():
    with pytest.raises(ValueError, match=r"rewards\['tool'\] has 2 rows, segments \(1, 1\)"):
        batch_token_credit(
            [["a"]], segments=torch.tensor([[0]]), advantages=torch.tensor([[0.0]]),
            rewards={"tool": torch.zeros(2)},
        )  # fmt: skip
    with pytest.raises(TypeError, match="decode="):
        token_credit([1, 2], segments=[0, 0], advantages=[0, 0])


def test_rows_without_tokens_without_rules_and_no_rows_work(tmp_path):
    empty = token_credit([], segments=[], advantages={"SLCA": []}, rewards={"tool": None})
    ruleless = token_credit(["a"], segments=[0], advantages={})
    for view in (empty, ruleless):
        assert "token credit" in printed(view)
        read(render_html(view))
    read(render_html([]))
    assert "no tokens" in write_html([empty, ruleless], tmp_path / "views.html").read_text("utf-8")


def test_the_print_shows_rewards_peers_totals_and_conflict():
    text = printed(conflict_case())
    assert re.search(r"tool .* 1 .* 0\.333 .* \+1\.50 .* 0 0 absent", text)
    assert re.search(r"tool .* 2 .* −0\.50 · −1\.00 · 50% .* \+1\.50 · \+3\.00 · 60%", text)
    assert "GRPO −0.50 · SLCA +1.50 ⚡ opposite signs" in text
    assert "masked · environment · 1 token" in text


def test_a_long_masked_stretch_is_cut_in_print_and_folded_in_html():
    view = token_credit(["w"] * 500, segments=[-1] * 500, advantages=[0] * 500)
    assert "480 tokens" in printed(view, masked_tokens=20)
    assert 'class="run off">' in render_html(view)
    assert len(read(render_html(view)).tokens) == 500


def test_shade_grows_with_credit_and_is_shared_by_the_rules():
    page = render_html(conflict_case())
    strengths = {float(x) for x in re.findall(r"--r1:rgb\(var\(--pos\)/([\d.]+)\)", page)}
    weak = {float(x) for x in re.findall(r"--r0:rgb\(var\(--neg\)/([\d.]+)\)", page)}
    assert strengths == {0.6}
    assert weak == {0.27}


def test_tokens_that_differ_inside_a_run_carry_their_own_shade():
    page = render_html(token_credit(["a", "b", "c"], segments=[0] * 3, advantages=[1.0, 1.0, -0.5]))
    assert re.search(r'class="t" title="0[^"]*">a', page)
    assert re.search(r'class="t" title="2[^"]*" style="--r0:rgb\(var\(--neg\)', page)


def test_a_long_rollout_takes_linear_time():
    size = 16_384
    credit = {rule: torch.randn(size, generator=torch.Generator().manual_seed(0)) for rule in ("a", "b")}
    view = token_credit(["tok"] * size, segments=[0] * size, advantages=credit)
    started = time.process_time()
    page = render_html(view)
    # A second on an idle core; anything quadratic takes minutes.
    assert time.process_time() - started < 20
    assert page.count('class="t"') == size


def test_rich_is_imported_only_to_print():
    code = "import sys, credit.view; assert 'rich' not in sys.modules, 'rich'"
    subprocess.run([sys.executable, "-c", code], check=True)
