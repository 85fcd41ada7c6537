"""The checks of `judge_checks` can fail: each of these faults is caught by the check named beside it."""

# a mutant is a line of the source, as it stands there

from collections.abc import Callable

import pytest

from rewards.endpoint import EndpointError
from tests.rewards import judge_checks as checks
from tests.rewards import test_trl_rewards as trl
from tests.rewards.mutants import mutated

MUTANTS: dict[str, tuple[str, str, str, Callable[[], None]]] = {
    "two ratings, the first counts": (
        "judge:parse_choice",
        "said.count(tag) != 1",
        "not said.count(tag)",
        checks.check_ratings,
    ),
    "a cut answer counts": ("judge:parse_choice", "for tag in tags:", "for tag in tags[:3]:", checks.check_ratings),
    "tags in any order": ("judge:parse_choice", "places != sorted(places)", "False", checks.check_ratings),
    "reads the reasoning": ("judge:parse_choice", 'text.rpartition("</think>")', '"", "", text', checks.check_ratings),
    "down is 0": ("judge:ask_judge", "JudgeResult(None,", "JudgeResult(0.0,", checks.check_summary_judge),
    "equal items are asked again": ("judge:run_batch", "dict.fromkeys(keyed)", "keyed", checks.check_batch),
    "one at a time": ("judge:run_batch", "min(workers, len(different))", "1", checks.check_batch),
    "no bound on exchanges": (
        "endpoint:ChatEndpoint._exchange",
        "with connection.slots:",
        "if True:",
        checks.check_mocker_bound,
    ),
    "does not try again": ("endpoint:ChatEndpoint._ask", "not error.transient", "True", checks.check_retries),
    "tries everything again": ("endpoint:ChatEndpoint._ask", "or not error.transient", "", checks.check_retries),
    "a try too many": ("endpoint:ChatEndpoint._ask", "tried == self.retries or", "", checks.check_retries),
    "ignores Retry-After": ("endpoint:ChatEndpoint._ask", "max(wait, error.wait)", "wait", checks.check_retries),
    "waits for a dripping answer": ("endpoint:_read", "time.monotonic() > end", "False", checks.check_bounds),
    "reads any size": ("endpoint:_read", "len(body) > _LARGEST_ANSWER", "False", checks.check_bounds),
    "the key leaves out the endpoint": (
        "endpoint:ChatEndpoint.chat",
        'self._url.encode() + b"\\n" + request',
        "request",
        checks.check_cache,
    ),
    "a word inside a word": ("rule_judge:_states", "if not (", "if True or not (", checks.check_rule_judge),
    "numbers as words": ("rule_judge:_states", "if number is not None and", "if False and", checks.check_rule_judge),
    "gives up at the first place": (
        "rule_judge:_states",
        "at = words.find(wanted, run.end() if run else at + 1)",
        "break",
        checks.check_rule_judge,
    ),
    "the last response": (
        "mocker:tool_response",
        "said.partition(_OPEN)",
        "said.rpartition(_OPEN)",
        checks.check_mocker,
    ),
    "an unclosed response is lost": ("mocker:tool_response", "default=len(inner)", "default=0", checks.check_mocker),
    "absent samples count 0": (
        "verdicts:_mean",
        "[sample.score for sample in samples if sample.score is not None]",
        "[sample.score or 0.0 for sample in samples]",
        checks.check_verdicts,
    ),
    "unscored is 0": (
        "adapters.trl:_by_gold",
        "rewards.append(None)",
        "rewards.append(0.0)",
        trl.test_scores_are_those_of_the_functions,
    ),
    "scores the completions": (
        "adapters.trl:_rollouts",
        "is None else messages",
        "is None else completions",
        trl.test_rollout_messages_go_before_completions,
    ),
    "no failures in the log": (
        "judge:count_results",
        "r.judge_failed for r",
        "False for r",
        trl.test_the_judge_sees_question_results_and_answer_side_by_side,
    ),
    "reasoning is the answer": (
        "conversation:closing_answer",
        'said.partition("<think>")[0]',
        "text",
        trl.test_conversations,
    ),
    "right keys are enough": ("baselines:_correct", "pair.value == 1.0", "pair.key > 0", checks.check_action),
    "pairs by nothing": ("baselines:action_score", "1.0 * (pair.value == 1.0)", "0.0", checks.check_action),
    "repeats only in a row": (
        "baselines:planner_score",
        "len(calls) - len(set(calls))",
        "sum(a == b for a, b in zip(calls, calls[1:]))",
        checks.check_planner,
    ),
    "a violation needs a verdict": (
        "baselines:planner_score",
        "-1.0 if violation else total",
        "-1.0 if violation and total is not None else total",
        checks.check_planner,
    ),
    "the guard spares the absent": (
        "guard:guard_omission",
        "penalty if omitted else summary",
        "penalty if omitted and summary is not None else summary",
        checks.check_guard,
    ),
    "the guard spares success": ("guard:guard_omission", "success and not omitted", "success", checks.check_guard),
    "the first box": ("answers:final_answer", "text.rfind(_BOX)", "text.find(_BOX)", checks.check_final_answer),
    "any box": (
        "answers:final_answer",
        "if mark is None:\n        return",
        "if False:\n        return",
        checks.check_final_answer,
    ),
    "ignores escapes": (
        "answers:final_answer",
        "        at += 1\n        elif",
        "        pass\n        elif",
        checks.check_final_answer,
    ),
    "as text only": ("answers:verify_answer", 'return verdict == "1"', "return False", checks.check_verify),
    "waits for the tower": (
        "_math_pool:_line",
        "not selector.select(left)",
        "not selector.select(3.0)",
        checks.check_verify,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_is_killed(name: str) -> None:
    function, old, new, check = MUTANTS[name]
    with mutated(function, old, new), pytest.raises((AssertionError, EndpointError, ValueError)):
        check()
