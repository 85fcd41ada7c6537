"""A rollout function for rows that bring their own ``tools``: TRL itself knows one tool list for all rows."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving

from credit.adapters.trl_batch import Schema, row_tools

Stop = Literal["answered", "turns", "length", "budget"]


@runtime_checkable
class ToolResult(Protocol):
    """What a tool answered, with its name, which some chat templates write down."""

    @property
    def name(self) -> str: ...

    @property
    def content(self) -> str: ...


@runtime_checkable
class Respond(Protocol):
    """Answers the tool calls of one assistant turn."""

    def __call__(self, text: str, tools: Any, /) -> Sequence[str | ToolResult]:
        """One result for each call in ``text``, in order; none when it makes no call. ``tools`` are schemas."""


@dataclass
class ToolRollout:
    """Roll out rows that each bring their own tools, on the trainer's own model or its vLLM.

    Each prompt is rendered with its row's schemas. Every assistant turn is handed to ``respond``, whose results
    are put behind it as tool messages, until a turn makes no call. Token ids are only ever concatenated. It is a
    ``rollout_func`` for :class:`credit.adapters.trl.CreditGRPOTrainer`, which hands it the rows.

    ``max_completion_length`` bounds all tokens of a rollout, those of tool results included. Nothing is cut
    without a trace: every rollout says why it ended in ``rollout_stop``, which reward functions receive beside
    ``rollout_messages``, and the shares are logged as ``rollout/stop_*``.

    * ``"answered"``: a turn made no call;
    * ``"turns"``: after ``max_turns`` answered turns the next one called again, and is not answered;
    * ``"length"``: the model ran into the budget within a turn, whose text is kept up to there;
    * ``"budget"``: the tool results of the last turn did not fit any more, and are left out whole.

    Args:
        respond: answers the calls of a turn, as ``rewards.simulator.answer_calls`` does. Called from up to
            ``workers`` threads.
        max_turns: how many turns with calls are answered.
        column: dataset column with the row's tools: a list of OpenAI schemas, its JSON, or nothing. Prefer JSON
            where schemas differ: Arrow fills lists of them up with nulls, which are taken out again here.
        workers: rollouts whose calls are answered at the same time.

    Example::

        trainer = CreditGRPOTrainer(
            model,
            components={"tool": [process_reward], "summary": [judge_reward]},
            rollout_func=ToolRollout(answer_calls),
            train_dataset=dataset,
        )
    """

    respond: Respond
    max_turns: int = 8
    column: str = "tools"
    workers: int = 8

    def __post_init__(self) -> None:
        if self.max_turns < 0 or self.workers < 1:
            raise ValueError(
                f"max_turns must be at least 0 and workers at least 1, got {self.max_turns}, {self.workers}"
            )

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What TRL asks of a rollout function; ``env_mask`` is 1 on the model's own tokens."""
        rows = getattr(trainer, "rollout_rows", None)
        if rows is None or len(rows) != len(prompts):
            raise ValueError("ToolRollout needs the rows of the batch: use it with CreditGRPOTrainer")
        engine = _Engine(trainer, _context_limit(trainer), _prepare_template(trainer))
        tools = [row_tools(row, self.column) for row in rows]
        rollouts = [
            _Rollout(_prompt_ids(prompt, own, trainer), own) for prompt, own in zip(prompts, tools, strict=True)
        ]
        turn = 0
        while _collective_max(sum(r.stop is None for r in rollouts), trainer):
            _generate_turn(rollouts, trainer, first=turn == 0)
            self._answer([r for r in rollouts if r.stop is None], engine, last=turn == self.max_turns)
            turn += 1
        return _collect(rollouts, trainer)

    def _answer(self, rollouts: "list[_Rollout]", engine: "_Engine", *, last: bool) -> None:
        waiting = []
        for rollout in rollouts:
            complete = rollout.turn_ids[-1:] and rollout.turn_ids[-1] in engine.trainer.eos_token_ids
            own = rollout.turn_ids[:-1] if complete else rollout.turn_ids
            text = engine.trainer._tokenizer.decode(own, clean_up_tokenization_spaces=False)
            rollout.messages.append({"role": "assistant", "content": text})
            if complete:
                waiting.append((rollout, text))
            else:
                rollout.stop = "length"
        with ThreadPoolExecutor(self.workers) as pool:
            answers = list(pool.map(lambda pair: self.respond(pair[1], pair[0].tools), waiting))
        for (rollout, _), results in zip(waiting, answers, strict=True):
            if not results:
                rollout.stop = "answered"
            elif last:
                rollout.stop = "turns"
            else:
                _append_results(rollout, results, engine)


@dataclass(frozen=True)
class _Engine:
    trainer: Any
    context: int
    needs_name: bool


@dataclass
class _Rollout:
    prompt_ids: list[int]
    tools: list[Schema]
    completion_ids: list[int] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    stop: Stop | None = None

    def append(self, ids: Sequence[int], logprobs: Sequence[float | None], *, own: bool) -> None:
        self.completion_ids += ids
        self.logprobs += logprobs
        self.env_mask += [int(own)] * len(ids)


def _prepare_template(trainer: Any) -> bool:
    """Let tool messages follow a turn without changing what stands before them; does the template name the tool?"""
    if trainer.tools:
        raise ValueError("rows bring their own tools: `tools` and `environment_factory` go without ToolRollout")
    if trainer.chat_template is None and not is_chat_template_prefix_preserving(trainer.processing_class):
        trainer.chat_template = get_training_chat_template(trainer.processing_class)
    once, again = ({"role": "tool", "name": name, "content": "x"} for name in "ab")
    return bool(trainer._get_tool_suffix_ids([once]) != trainer._get_tool_suffix_ids([again]))


def _prompt_ids(prompt: Any, tools: list[Schema], trainer: Any) -> list[int]:
    if not isinstance(prompt, list):
        raise ValueError(f"ToolRollout needs conversational prompts (lists of messages), got {prompt!r:.200}")
    rendered = trainer.processing_class.apply_chat_template(
        [prompt],
        tools=tools or None,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return list(rendered["input_ids"][0])


def _generate_turn(rollouts: list[_Rollout], trainer: Any, *, first: bool) -> None:
    """Generate one turn of every unfinished rollout, on all ranks at once."""
    active = [r for r in rollouts if r.stop is None]
    # Sharded models and the vLLM server generate collectively, so a rank that has finished takes part with a
    # rollout whose result it throws away; the server deals out equal shares only.
    most = _collective_max(len(active), trainer)
    batch = active + rollouts[:1] * ((most if trainer.use_vllm else 1) - len(active))
    prompts = [r.prompt_ids + r.completion_ids for r in batch]
    size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    turns, logprobs = trainer._generate_single_turn(prompts, None, {}, size if first else 1)
    for rollout, ids, scores in zip(active, turns, logprobs or [None] * len(turns)):
        room = trainer.max_completion_length - len(rollout.completion_ids)
        rollout.turn_ids = list(ids[:room])
        rollout.append(rollout.turn_ids, (scores or [0.0] * len(ids))[:room], own=True)


def _append_results(rollout: _Rollout, results: Sequence[str | ToolResult], engine: _Engine) -> None:
    trainer = engine.trainer
    if engine.needs_name and any(isinstance(result, str) for result in results):
        raise ValueError("the chat template writes the tool's name: respond must return results with a `name`")
    messages = [
        {"role": "tool", "name": "tool", "content": result}
        if isinstance(result, str)
        else {"role": "tool", "name": result.name, "content": result.content}
        for result in results
    ]
    suffix = list(trainer._get_tool_suffix_ids(messages))
    total = len(rollout.completion_ids) + len(suffix)
    # One token at least must be left for the next turn.
    if total >= trainer.max_completion_length or len(rollout.prompt_ids) + total >= engine.context:
        rollout.stop = "budget"
        return
    rollout.append(suffix, [0.0] * len(suffix), own=False)
    rollout.messages += messages


def _context_limit(trainer: Any) -> int:
    if trainer.use_vllm and trainer.vllm_mode == "colocate":
        return int(trainer.vllm_generation.llm.llm_engine.model_config.max_model_len)
    return int(trainer.model.config.get_text_config().max_position_embeddings)


def _collective_max(value: int, trainer: Any) -> int:
    local = torch.tensor([value], device=trainer.accelerator.device)
    return int(trainer.accelerator.gather(local).max())


def _collect(rollouts: list[_Rollout], trainer: Any) -> dict[str, Any]:
    for stop in ("turns", "length", "budget"):
        trainer._pending_metrics[f"rollout/stop_{stop}"] += [float(r.stop == stop) for r in rollouts]
    return {
        "prompt_ids": [r.prompt_ids for r in rollouts],
        "completion_ids": [r.completion_ids for r in rollouts],
        "env_mask": [r.env_mask for r in rollouts],
        "logprobs": [r.logprobs for r in rollouts] if trainer.use_vllm else None,
        "rollout_messages": [r.messages for r in rollouts],
        "rollout_stop": [r.stop for r in rollouts],
    }
