"""Credit routing for TRL: a ``GRPOTrainer`` whose advantages are one per token, not one per rollout."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from credit import (
    SLCA,
    CreditRule,
    clip_statistics,
    omission_guard,
    segment_statistics,
    tool_summary_segments,
)
from credit._safe import masked_mean, select
from credit.adapters.trl_components import refuse_options, require_fit, reward_plan
from credit.adapters.trl_metrics import over_ranks, segment_metrics
from credit.stats import ClipStatistics, SegmentStatistics


class CreditGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types to check against
    """TRL's GRPO trainer with credit routed to the segments of each rollout.

    ``advantages[b, t] = rule(component rewards, group, segments)[b, t]``. Generation, tools, environments,
    vLLM, KL, logging and checkpoints stay TRL's.

    A rollout without a learnable token (aborted, or truncated under ``mask_truncated_completions``) is absent
    from its group's statistics. So is, in one component, a rollout for which every reward function of that
    component returned ``None``; :class:`credit.adapters.trl_components.RewardPlan` says what happens where
    only some did. Reward functions that want the environment's own reward read it from ``environments``.

    Args:
        model: model, or its name, as for ``GRPOTrainer``.
        components: reward functions of each component the rule reads, in place of ``reward_funcs``.
        rule: a rule of :mod:`credit.rules`, ``SLCA()`` by default. It does the normalising.
        component_weights: weight of each function in its component, in place of ``reward_weights``; default 1.
        tool_required: a dataset column, or a function of a row, that says whether the rollout had to call a
            tool. Turns the omission guard on, before normalising.
        final: which run is the summary, as in :func:`credit.segments.tool_summary_segments`.
        **kwargs: everything else of ``GRPOTrainer``, by keyword.

    Raises:
        ValueError: components that do not fit the rule, or a TRL option that would undo the routing.

    Example::

        trainer = CreditGRPOTrainer(
            "Qwen/Qwen3-0.6B",
            rule=SLCA(),
            components={"tool": [process_reward], "summary": [judge_reward]},
            tool_required="needs_tool",
            train_dataset=dataset,
            tools=[search],
        )

    Reference:
        SLCA eqs. 3, 17 and 21; the trainer is ours.
    """

    def __init__(
        self,
        model: Any,
        *,
        components: Mapping[str, Any],
        rule: CreditRule | None = None,
        component_weights: Mapping[str, Sequence[float]] | None = None,
        tool_required: str | Callable[[Mapping[str, Any]], bool] | None = None,
        final: Literal["last_run", "unless_followed"] = "last_run",
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if reward_funcs is not None:
            raise ValueError("reward_funcs and components are both given; the functions belong in components")
        if args is not None:
            refuse_options(args)
        self.rule: CreditRule = SLCA() if rule is None else rule
        self.plan = reward_plan(components, component_weights)
        require_fit(self.rule, self.plan, guarded=tool_required is not None)
        self.tool_required = tool_required
        self.final: Literal["last_run", "unless_followed"] = final
        self.rollout_rows: list[dict[str, Any]] = []
        self._mask: Bool[Tensor, "batch tokens"] | None = None
        super().__init__(model=model, reward_funcs=list(self.plan.functions), args=args, **kwargs)
        own = self.reward_func_names[len(self.plan.functions) :]
        if own:
            raise ValueError(
                f"get_reward of the environment {own} feeds no component; rename it and call it in a reward "
                "function, which is given the `environments`"
            )
        self.reward_weights = self.plan.weights.sum(dim=1)  # only for what TRL logs as "reward"

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.rollout_rows = inputs  # TRL hands a rollout function the prompts only
        required = self._required(inputs)
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        mask = learnable_mask(output)
        for key in ("old_per_token_logps", "ref_per_token_logps"):
            if key in output:
                output[key] = select(mask, output[key])
        segments = tool_summary_segments(mask, final=self.final, completion_mask=output["completion_mask"])
        called = self._called(output["completion_ids"], mask)
        # Groups may lie across ranks, so the rule sees all of them and each rank keeps its slice.
        padded = self.accelerator.pad_across_processes(segments, dim=1, pad_index=-1)
        everyone, guard = self.accelerator.gather((padded, torch.stack([required, called], dim=1)))
        routed = self._route(everyone, required=guard[:, 0], called=guard[:, 1])
        first = self.accelerator.process_index * len(inputs)
        output["advantages"] = routed[first : first + len(inputs), : mask.shape[1]].contiguous()
        output["segments"] = segments
        self._log_credit(routed, everyone)
        return output

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Float[Tensor, "everyone functions"]:
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._scored = (rewards, completions)
        return rewards

    def _route(
        self,
        segments: Int[Tensor, "everyone tokens"],
        *,
        required: Bool[Tensor, " everyone"],
        called: Bool[Tensor, " everyone"],
    ) -> Float[Tensor, "everyone tokens"]:
        learns = (segments >= 0).any(dim=1)
        rewards = torch.where(learns[:, None], self._scored[0], torch.nan)
        size = self.num_generations if self.model.training else self.num_generations_eval
        group = torch.arange(len(rewards), device=rewards.device) // size
        named = self.plan(rewards, group)
        if self.tool_required is None:
            return self.rule(named, group, segments)
        required = required & learns
        guarded = omission_guard(named["tool"], named["summary"], required, called)
        named["tool"], named["summary"] = guarded
        return self.rule(named, group, segments, omitted=required & ~called)

    def _required(self, rows: list[dict[str, Any]]) -> Bool[Tensor, " batch"]:
        asked = self.tool_required
        if isinstance(asked, str) and any(asked not in row for row in rows):
            raise ValueError(f"tool_required: no column {asked!r} in the row; it has {sorted(rows[0])}")
        if asked is None:
            answers = [False for _ in rows]
        else:
            answers = [bool(asked(row) if callable(asked) else row[asked]) for row in rows]
        return torch.tensor(answers, device=self.accelerator.device)

    def _called(
        self, ids: Int[Tensor, "batch tokens"], mask: Bool[Tensor, "batch tokens"]
    ) -> Bool[Tensor, " batch"]:
        """Rows whose model tokens hold an opening tag, or whose messages hold a parsed call."""
        # Environment text may quote the tag; padding in its place also keeps two runs from joining into one.
        own = ids.masked_fill(~mask, self._tokenizer.pad_token_id)
        texts = self._tokenizer.batch_decode(own, skip_special_tokens=False)
        called = [
            "<tool_call>" in text
            or (isinstance(turns, list) and any(turn.get("tool_calls") for turn in turns))
            for text, turns in zip(texts, self._scored[1], strict=True)
        ]
        return torch.tensor(called, device=ids.device)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._mask is not None:
            # TRL multiplies by its mask, and 0 * inf is NaN; selecting keeps masked tokens out both ways.
            logps = select(self._mask, logps)
            self._logps = logps.detach()
        return logps, entropies, aux_loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._mask = learnable_mask(inputs)
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            self._mask = None
        statistics = clip_statistics(
            self._logps,
            inputs.get("old_per_token_logps", self._logps),
            inputs["advantages"],
            inputs["segments"],
            clip_low=self.epsilon_low,
            clip_high=self.epsilon_high,
            dual_clip=self.args.delta,
        )
        self._log_segments(over_ranks(statistics, self.accelerator))
        return loss

    def _log_credit(self, routed: Tensor, segments: Tensor) -> None:
        self._log_segments(segment_statistics(routed, segments))
        # TRL has just logged scalar advantages of its own, which nothing uses.
        means = masked_mean(routed, segments >= 0)
        logged = self._logs["advantages"]
        for _ in range(min(len(means), len(logged))):
            logged.pop()
        logged.extend(means.tolist())

    def _log_segments(self, statistics: SegmentStatistics | ClipStatistics) -> None:
        mode = "train" if self.model.training else "eval"
        for name, value in segment_metrics(statistics).items():
            self._metrics[mode][name].append(value)


def learnable_mask(batch: Mapping[str, Any]) -> Bool[Tensor, "batch tokens"]:
    """Model tokens of a TRL batch: ``completion_mask * tool_mask`` (TRL pads the latter with 1)."""
    mask: Tensor = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask
