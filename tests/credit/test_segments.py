"""Runs, tool and summary segments, spans."""

import pytest
import torch

from credit import Field, Owner, Segment, has_segment, run_ids, spans_to_segments, tool_summary_segments
from tests.credit.checks_credit import (
    check_run_ids,
    check_segments_ignore_padding,
    check_spans,
    check_tool_summary,
)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (check_run_ids, run_ids),
        (check_tool_summary, tool_summary_segments),
        (check_segments_ignore_padding, run_ids),
        (check_segments_ignore_padding, tool_summary_segments),
        (check_spans, spans_to_segments),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_checks(check, function):
    check(function)


def test_codes_are_those_the_rules_index_with():
    assert (Segment.NONE, Segment.TOOL, Segment.SUMMARY) == (-1, 0, 1)
    assert (Owner.OBSERVATION, Owner.CONTROLLER, Owner.EXPERT) == (-1, 0, 1)
    assert (Field.NONE, Field.THINK, Field.TOOL) == (-1, 0, 1)


def test_a_rollout_cut_after_a_tool_answer_has_no_summary():
    mask = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 1, 0, 1, 0, 0]])
    completion = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
    segments = tool_summary_segments(mask, final="unless_followed", completion_mask=completion)
    assert has_segment(segments, Segment.SUMMARY).tolist() == [False, True]
    assert has_segment(segments, Segment.TOOL).tolist() == [True, True]


def test_one_run_is_all_summary_and_no_run_is_nothing():
    segments = tool_summary_segments(torch.tensor([[0, 1, 1], [0, 0, 0]]))
    assert segments.tolist() == [[-1, 1, 1], [-1, -1, -1]]
    assert has_segment(torch.zeros(2, 0, dtype=torch.int64), Segment.TOOL).tolist() == [False, False]
