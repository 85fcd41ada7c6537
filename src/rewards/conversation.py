"""What scorers need of a rollout given as chat messages: the texts, the tool results, the question, the answer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.calls import ParsedCalls, parse_tool_calls

Completion = str | Sequence[Mapping[str, Any]]


def assistant_turns(completion: Completion) -> list[str]:
    """Assistant texts in order, as the model wrote them; a bare text is one turn.

    `tool_calls` of a message are written behind its content, each in a Hermes block.

    Example:
        >>> assistant_turns([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now"}}]}])
        ['<tool_call>\\n{"name": "now", "arguments": {}}\\n</tool_call>']
    """
    if isinstance(completion, str):
        return [completion]
    return [turn_text(message) for message in completion if message.get("role") == "assistant"]


def parsed_turns(completion: Completion, format: str = "hermes") -> list[ParsedCalls]:
    """The calls of each assistant text: `tool_calls` of a message, or what its content says in the format.

    Example:
        >>> (turn,) = parsed_turns('{"name": "now", "parameters": {}}', "llama3_json")
        >>> turn.calls[0].name
        'now'
    """
    if isinstance(completion, str):
        return [parse_tool_calls(completion, format)]
    return [_parsed(message, format) for message in completion if message.get("role") == "assistant"]


def _parsed(message: Mapping[str, Any], format: str) -> ParsedCalls:
    return parse_tool_calls(turn_text(message), "hermes" if message.get("tool_calls") else format)


def tool_results(completion: Completion) -> list[str]:
    """What the tools answered, in order.

    Example:
        >>> tool_results([{"role": "assistant", "content": "?"}, {"role": "tool", "content": "4"}])
        ['4']
    """
    if isinstance(completion, str):
        return []
    return [content_text(message) for message in completion if message.get("role") == "tool"]


def closing_answer(completion: Completion, format: str = "hermes") -> str:
    """The text in which the rollout ends, without reasoning; "" where it ends in a call, a result or in reasoning.

    `format` is that of calls in texts.

    Example:
        >>> closing_answer([{"role": "assistant", "content": "<think>2 + 2</think>It is 4."}])
        'It is 4.'
        >>> closing_answer('<tool_call>{"name": "now"}</tool_call>')
        ''
    """
    if isinstance(completion, str):
        text, parsed = completion, parse_tool_calls(completion, format)
    else:
        last = completion[-1] if completion else {}
        if last.get("role") != "assistant":
            return ""
        text, parsed = turn_text(last), _parsed(last, format)
    if parsed.num_open:
        return ""
    _, _, said = text.rpartition("</think>")
    return said.partition("<think>")[0].strip()


def question_text(prompt: Completion) -> str:
    """The user's last message; a bare text is the question.

    Example:
        >>> question_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}])
        '2 + 2?'
    """
    if isinstance(prompt, str):
        return prompt
    return next((content_text(m) for m in reversed(prompt) if m.get("role") == "user"), "")


def content_text(message: Mapping[str, Any]) -> str:
    """The text of a message, whose content may be a text, a list of parts, or missing.

    Example:
        >>> content_text({"content": [{"type": "text", "text": "4"}, {"type": "image"}]})
        '4'
    """
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        parts = [part for part in content if isinstance(part, Mapping)]
        return "\n".join(str(part.get("text") or "") for part in parts if part.get("type", "text") == "text")
    return "" if content is None else str(content)


def turn_text(message: Mapping[str, Any]) -> str:
    """An assistant message as the model wrote it: content, then each call in a Hermes block.

    Example:
        >>> turn_text({"content": "Now.", "tool_calls": [{"function": {"name": "now"}}]})
        'Now.\\n<tool_call>\\n{"name": "now", "arguments": {}}\\n</tool_call>'
    """
    blocks = [content_text(message)]
    calls = message.get("tool_calls") or ()
    for call in calls if isinstance(calls, (list, tuple)) else (calls,):
        body = call.get("function") or call if isinstance(call, Mapping) else call
        if isinstance(body, Mapping):
            arguments = body.get("arguments", {})
            # TRL keeps the alias that a model wrote, beside arguments that it left empty.
            arguments = body.get("parameters") or {} if arguments in (None, "", {}) else arguments
            body = {"name": body.get("name"), "arguments": arguments}
        blocks.append(f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>")
    return "\n".join(block for block in blocks if block)
