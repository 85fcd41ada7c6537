"""A judge that needs no model: does the final answer state each fact?"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rewards.judge import JudgeItem, JudgeResult

# A sign counts only where no word ends before it: "3-4" is 3 and 4, and a date is its parts. Commas belong to a number
# where they part it into thousands. Digits inside a word ("v4", "4th") or a version ("1.2.3") are no number; a unit may
# touch a number, but not one that scales it ("4k", "4m", "4B") or makes a decade of it ("1990s").
# The repetition is bounded, so that a long list of digits costs linear time.
_UNITS = "km|cm|mm|kg|mg|g|lbs?|oz|ft|ms|min|h|hrs?|am|pm|[KMGT]B|[kMG]?Hz|k?Wh?|V|C|F|kph|mph|px|USD|EUR|GBP"
_NUMBER = re.compile(
    r"(?<![\w.])-?(?:[0-9]{1,3}(?:,[0-9]{3}){1,20}|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,4})?"
    rf"(?:(?!\w)|(?=(?:{_UNITS})(?!\w)))(?!\.[0-9])",
    re.ASCII,
)
_RUN = re.compile(r"\w+")
_MOST_DIGITS = 400


@dataclass(frozen=True)
class RuleJudge:
    """Share of facts that the final answer states: the default judge where there is no endpoint.

        S = |{f ∈ facts : the answer states f}| / |facts|

    A fact that is a number, or a text that is one, is stated by any number of equal value ("1200" by "1,200.0"), a
    unit behind it or not ("4" by "4km");
    other text by the same words, in any case and spacing, with no letter or digit touching: "4" is not stated by "42".
    Without gold facts, the facts are the scalars of the tool results, each once; without these either, any answer
    scores 1 and none scores 0.

    Example:
        >>> judge = RuleJudge()
        >>> judge("How many, and where?", ['{"count": 1200, "city": "Rome"}'], "There are 1,200 of them.").score
        0.5
        >>> judge("How many?", [], "42 or so", facts=["4"]).score
        0.0

    Reference: ours.
    """

    def __call__(
        self, question: str, tool_results: Sequence[str], answer: str, facts: Sequence[Any] | None = None
    ) -> JudgeResult:
        """Judge one answer.

        Args:
            question: not looked at.
            tool_results: JSON or plain texts, where `facts` is None.
            answer: the final answer.
            facts: gold facts, text or numbers.

        Returns:
            A score in [0, 1], never absent. No model output raises.

        Raises:
            TypeError: `facts` or `tool_results` is one text.
        """
        for name, given in (("facts", facts), ("tool_results", tool_results)):
            if isinstance(given, str):
                raise TypeError(f"{name}: expected a sequence, got one text")
        wanted = list(dict.fromkeys(_scalars(list(facts)) if facts is not None else result_facts(tool_results)))
        if not wanted:
            return JudgeResult(float(bool(answer.strip())))
        words, numbers = _words(answer), _numbers(answer)
        stated = sum(_states(words, numbers, fact) for fact in wanted)
        return JudgeResult(stated / len(wanted))

    def batch(self, items: Sequence[JudgeItem]) -> list[JudgeResult]:
        """Judge several rollouts by their own tool results."""
        return [self(*item) for item in items]


def result_facts(tool_results: Sequence[str]) -> list[str]:
    """The scalars of tool results, as texts; a result that is no JSON is one fact.

    Example:
        >>> result_facts(['{"a": 1, "b": ["x", null]}', "sunny"])
        ['1', 'x', 'sunny']
    """
    facts: list[str] = []
    for result in tool_results:
        try:
            value = json.loads(result, parse_int=str, parse_float=str)
        except (ValueError, RecursionError):
            value = result
        facts += _scalars(value)
    return facts


def _scalars(value: Any) -> list[str]:
    found: list[str] = []
    level = [value]
    while level:  # iterative: a tool's answer may nest as deep as it likes
        item = level.pop()
        if isinstance(item, Mapping):
            level += reversed(list(item.values()))
        elif isinstance(item, (list, tuple)):
            level += reversed(item)
        elif isinstance(item, bool):
            found.append("true" if item else "false")
        elif item is not None and str(item).strip():
            found.append(" ".join(str(item).split()))
    return found


def _words(text: str) -> str:
    return " ".join(text.casefold().split())


def _numbers(text: str) -> set[Decimal]:
    found = (match.group() for match in _NUMBER.finditer(text))
    return {Decimal(number.replace(",", "")) for number in found if len(number) <= _MOST_DIGITS}


def _states(words: str, numbers: set[Decimal], fact: str) -> bool:
    number = _NUMBER.fullmatch(fact)
    if number is not None and len(fact) <= _MOST_DIGITS:
        return Decimal(fact.replace(",", "")) in numbers
    wanted = fact.casefold()
    at = words.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        if not (_touches(words, at - 1, wanted[0]) or _touches(words, end, wanted[-1])):
            return True
        # No other place in the same word is free on its left: a million of them would each be tried at full length.
        run = _RUN.match(words, at)
        at = words.find(wanted, run.end() if run else at + 1)
    return False


def _touches(words: str, at: int, edge: str) -> bool:
    """Whether the character at `at` runs on into a fact whose edge is a letter or digit."""
    return 0 <= at < len(words) and _is_word(words[at]) and _is_word(edge)


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
