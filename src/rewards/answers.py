"""RIVET's outcome: is the final answer the reference, as mathematics?"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rewards._math_pool import math_pool

_MARK = re.compile(r"Answer:[ \t]*\\boxed\{")
_BOX = "\\boxed{"
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
# Longer ones are not answers, and would only keep a process busy until it is killed.
_LONGEST_ANSWER = 2000


def final_answer(text: str) -> str | None:
    """What stands in the last box of the last `Answer: \\boxed{…}`; None where there is no whole one.

    Boxes after the last `Answer:` that opens one count too, and the last of them is taken. What stands in
    `<think>…</think>`, in an unclosed `<think>`, or before a `</think>` that the prompt opened is no answer.

    Example:
        >>> final_answer(r"Answer: \\boxed{4} no wait \\boxed{\\frac{1}{2}}")
        '\\\\frac{1}{2}'
        >>> final_answer(r"so \\boxed{4}") is None
        True

    Reference: the answer line of RIVET; the last box is ours.
    """
    text = _said(text)
    last = text.rfind("Answer:")
    mark = None
    while last >= 0 and mark is None:
        mark = _MARK.match(text, last)
        last = text.rfind("Answer:", 0, last)
    if mark is None:
        return None
    start = text.rfind(_BOX) + len(_BOX)
    depth, at = 1, start
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if not depth:
                return text[start:at].strip()
        at += 1
    return None


def _said(text: str) -> str:
    """The text without its reasoning."""
    before, tag, after = text.partition("</think>")
    return _THOUGHT.sub("\n", after if tag and "<think>" not in before else text)


def verify_answer(text: str, reference: str, timeout: float = 5.0) -> bool:
    """Whether the final answer of a text equals the reference, as mathematics.

    Args:
        text: what the model wrote; its answer is the last `Answer: \\boxed{…}`.
        reference: the right answer, LaTeX or plain, boxed or not.
        timeout: seconds for the comparison; one that takes longer is not equal, and its process is killed.

    Returns:
        Whether they are equal; False without an answer. No model output raises or hangs.

    Raises:
        ValueError: the reference is empty or no mathematics.
        ImportError: math-verify is not installed.

    Example:
        >>> verify_answer(r"Half of it. Answer: \\boxed{\\frac{1}{2}}", r"\\frac{1}{2}")
        True
        >>> verify_answer("I do not know.", "4")
        False

    Reference: RIVET, outcome reward; the process pool is ours.
    """
    wanted = _reference(reference)
    given = final_answer(text)
    if not given or len(given) > _LONGEST_ANSWER:
        return False
    if "".join(given.split()) == "".join(wanted.split()):
        return True
    verdict = math_pool().ask([given, wanted], timeout)
    if verdict == "?":
        raise ValueError(f"reference: math-verify cannot read {reference[:80]!r}")
    return verdict == "1"


def verify_answers(
    texts: Sequence[str], references: Sequence[str], timeout: float = 5.0, rows: Sequence[str] | None = None
) -> list[bool]:
    """`verify_answer` for a batch, on all processes of the pool.

    Args:
        texts, references, timeout: as in `verify_answer`.
        rows: what to call each row in an error; None: `references[0]`, `references[1]`, …

    Raises:
        ValueError: as `verify_answer`, the row named, or there are not as many references as texts.

    Example:
        See `verify_answer`.

    Reference: ours.
    """
    if len(texts) != len(references):
        raise ValueError(f"references: {len(references)} for {len(texts)} texts")
    if not texts:
        return []

    def verdict(index: int) -> bool:
        try:
            return verify_answer(texts[index], references[index], timeout)
        except ValueError as error:
            raise ValueError(f"{rows[index] if rows else f'references[{index}]'}: {error}") from error

    with ThreadPoolExecutor(math_pool().size) as threads:
        return list(threads.map(verdict, range(len(texts))))


def outcome_reward(text: str, reference: str) -> float:
    """RIVET's outcome.

        R = +1 if the final answer equals the reference, else −1

    Args:
        text: what the model wrote.
        reference: the right answer.

    Returns:
        1.0 or −1.0; −1.0 without an answer.

    Raises:
        ValueError, ImportError: as `verify_answer`.

    Example:
        >>> outcome_reward(r"Answer: \\boxed{4} no wait \\boxed{5}", "5"), outcome_reward("5", "5")
        (1.0, -1.0)

    Reference: RIVET section 3.3.
    """
    return 1.0 if verify_answer(text, reference) else -1.0


def _reference(reference: str) -> str:
    """The reference without box or dollar signs."""
    bare = reference.strip()
    if _BOX in bare:
        bare = final_answer(f"Answer: {bare[bare.rfind(_BOX) :]}") or ""
    bare = bare.strip("$").strip()
    if not bare:
        raise ValueError(f"reference: expected an answer, got {reference[:80]!r}")
    return bare
