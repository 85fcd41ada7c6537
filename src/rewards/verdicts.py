"""The judges of the baselines: was the task solved (ToolPO), was everything looked up that it needs (RLTR)."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from rewards.endpoint import ChatEndpoint
from rewards.judge import MATERIAL, JudgeItem, JudgeResult, ask_judge, parse_choice, run_batch

SOLVED: Mapping[str, float] = {"unsolved": 0.0, "solved": 1.0}
COMPLETE: Mapping[str, float] = {"incomplete": 0.0, "complete": 1.0}

SOLVED_PROMPT = f"""You decide whether an assistant has solved the user's task.
{MATERIAL}

Solved means: the final answer gives the user everything that was asked for, and the tool results bear it out.
Everything else is unsolved: an answer that is partial, contradicts the results, is made up, or is missing.

Reply in exactly this form, with one word inside <verdict>:
<outcome>
<reasoning>one or two sentences</reasoning>
<verdict>solved or unsolved</verdict>
</outcome>"""

COMPLETE_PROMPT = f"""You decide whether an assistant has gathered what a task needs. How the answer is worded is not
your concern.
{MATERIAL}

Complete means: with these tool results alone, someone could answer every part of the question. Results that are
errors, or about something else, give nothing.

Reply in exactly this form, with one word inside <verdict>:
<outcome>
<reasoning>one or two sentences</reasoning>
<verdict>complete or incomplete</verdict>
</outcome>"""


@dataclass(frozen=True)
class SolvedJudge(ChatEndpoint):
    """ToolPO's outcome by a language model: 1 for solved, 0 for unsolved.

    Args: those of `ChatEndpoint`; the temperature is 0.

    Returns:
        A `JudgeResult`, as `SummaryJudge` does: absent, failed and scored are three things.

    Example:
        >>> SolvedJudge("http://localhost:8000/v1", "judge").temperature
        0.0

    Reference: SLCA appendix C.4; the wording of the prompt is ours. The outcome by rule is `reference_rule`.
    """

    def __call__(self, question: str, tool_results: Sequence[str], answer: str) -> JudgeResult:
        parse = partial(parse_choice, block="outcome", field="verdict", scores=SOLVED)
        return ask_judge(self, SOLVED_PROMPT, question, tool_results, answer, parse)

    def batch(self, items: Sequence[JudgeItem]) -> list[JudgeResult]:
        """Judge several rollouts, `concurrency` at once and equal ones once."""
        return run_batch(self, items, self.concurrency)


@dataclass(frozen=True)
class CompletenessJudge(ChatEndpoint):
    """RLTR's completeness checker: the mean of N samples of a language model, each complete (1) or incomplete (0).

    Samples that could not be had are left out of the mean; where none could, the score is absent. A sample out of
    form counts 0 and marks the result as failed.

    Args: those of `ChatEndpoint`, and
        samples: samples a rollout. They are sent with seeds 0, 1, …, so each has its own place in the cache.

    Raises:
        ValueError: as `ChatEndpoint`, or `samples` below 1.

    Example:
        >>> CompletenessJudge("http://localhost:8000/v1", "judge").samples
        3

    Reference: SLCA appendix C.4 (N = 3); the temperature, which it leaves open, and the wording are ours.
    """

    temperature: float = 0.6
    samples: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1:
            raise ValueError(f"samples: expected >= 1, got {self.samples}")

    def __call__(self, question: str, tool_results: Sequence[str], answer: str) -> JudgeResult:
        return self.batch([JudgeItem(question, tuple(tool_results), answer)])[0]

    def batch(self, items: Sequence[JudgeItem]) -> list[JudgeResult]:
        """Judge several rollouts, `concurrency` samples at once."""
        with ThreadPoolExecutor(self.samples) as pool:
            drawn = pool.map(
                lambda n: run_batch(partial(self._sample, n), items, self.concurrency), range(self.samples)
            )
        return [_mean(samples) for samples in zip(*drawn)]

    def _sample(self, seed: int, question: str, tool_results: Sequence[str], answer: str) -> JudgeResult:
        parse = partial(parse_choice, block="outcome", field="verdict", scores=COMPLETE)
        return ask_judge(self, COMPLETE_PROMPT, question, tool_results, answer, parse, seed)


def _mean(samples: Sequence[JudgeResult]) -> JudgeResult:
    scores = [sample.score for sample in samples if sample.score is not None]
    reason = next((sample.reason for sample in samples if sample.reason is not None), None)
    if not scores:
        return JudgeResult(None, reason=reason)
    return JudgeResult(sum(scores) / len(scores), any(sample.judge_failed for sample in samples), reason)
