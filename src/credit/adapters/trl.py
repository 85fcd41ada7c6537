"""Credit routing for TRL: a ``GRPOTrainer`` whose advantages are one per token, not one per rollout."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from trl import GRPOConfig

from credit import (
    SLCA,
    CreditRule,
    clip_statistics,
    omission_guard,
    segment_statistics,
    tool_summary_segments,
)
from credit._safe import masked_mean, select
from credit.adapters.trl_batch import learnable_mask, rows_that_must_call, rows_with_call
from credit.adapters.trl_components import environment_reward, refuse_options, require_fit, reward_plan
from credit.adapters.trl_metrics import clip_limits, over_ranks, segment_metrics
from credit.adapters.trl_routing import RoutedGRPOTrainer, RoutingHook, require_hook
from credit.stats import ClipStatistics, SegmentStatistics

_PER_TOKEN = ("advantages", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


class CreditGRPOTrainer(RoutedGRPOTrainer):
    """TRL's GRPO trainer with credit routed to the segments of each rollout.

    ``advantages[b, t] = rule(component rewards, group, segments)[b, t]``. Generation, tools, environments,
    vLLM, KL, logging and checkpoints stay TRL's.

    A rollout without a learnable token (aborted, or truncated under ``mask_truncated_completions``) is absent
    from its group's statistics. So is, in one component, a rollout for which every reward function of that
    component returned ``None``; :class:`credit.adapters.trl_components.RewardPlan` says what happens where
    only some did. An environment's own ``get_reward`` goes into a component as ``environment_reward``.

    Args:
        model: model, or its name, as for ``GRPOTrainer``.
        components: reward functions of each component the rule reads, in place of ``reward_funcs``.
        rule: a rule of :mod:`credit.rules`; ``SLCA()`` by default. It does the normalising.
        component_weights: weight of each function in its component, in place of ``reward_weights``; default 1.
        tool_required: a dataset column, or a function of a row, that says whether the rollout had to call a
            tool. Turns the omission guard on, before normalising.
        final: which run is the summary, as in :func:`credit.segments.tool_summary_segments`.
        routing: steers the experts of a mixture-of-experts model, such as ``moe_routing.adapters.trl.TurnRouting``;
            see :class:`credit.adapters.trl_routing.RoutedGRPOTrainer`. None leaves every gradient alone.
        **kwargs: everything else of ``GRPOTrainer``, by keyword.

    Raises:
        ValueError: components that do not fit the rule, or a TRL option that would undo the routing.
        TypeError: ``routing`` lacks a method of :class:`credit.adapters.trl_routing.RoutingHook`.
        NotImplementedError: ranks share a batch; see :func:`credit.adapters.trl_ranks.require_own_rows`.

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
        routing: RoutingHook | None = None,
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
        self.routing = require_hook(routing)
        self.final: Literal["last_run", "unless_followed"] = final
        self.rollout_rows: list[dict[str, Any]] = []
        self._mask: Bool[Tensor, "batch tokens"] | None = None
        super().__init__(model=model, reward_funcs=list(self.plan.functions), args=args, **kwargs)
        self._drop_own_column()
        self.reward_weights = self.plan.weights.sum(dim=1)  # only for what TRL logs as "reward"

    def _drop_own_column(self) -> None:
        """TRL adds a reward column for an environment with `get_reward`; here it belongs in a component."""
        count = len(self.plan.functions)
        if self.reward_func_names[count:] and environment_reward not in self.plan.functions:
            raise ValueError(
                f"get_reward of the environment {self.reward_func_names[count:]} feeds no component; put "
                "credit.adapters.trl.environment_reward into one"
            )
        for column in (self.reward_funcs, self.reward_func_names, self.reward_processing_classes):
            del column[count:]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.rollout_rows = inputs  # TRL hands a rollout function the prompts only
        required = rows_that_must_call(inputs, self.tool_required)
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        mask = learnable_mask(output)
        segments = tool_summary_segments(mask, final=self.final, completion_mask=output["completion_mask"])
        called = rows_with_call(output["completion_ids"], mask, self._scored[1], self._tokenizer)
        flags = torch.tensor([required, called], device=mask.device).T.contiguous()
        # Groups may lie across ranks, so the rule sees all of them and each rank keeps its slice.
        padded = self.accelerator.pad_across_processes(segments, dim=1, pad_index=-1)
        everyone, guard = self.accelerator.gather((padded, flags))
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

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._mask is not None:
            logps, entropies = select(self._mask, logps), select(self._mask, entropies)
            self._logps = logps.detach()
        return logps, entropies, aux_loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        # TRL multiplies by its mask, and 0 * inf is NaN; selecting keeps masked tokens out both ways.
        self._mask = learnable_mask(inputs)
        inputs = inputs | {key: select(self._mask, inputs[key]) for key in _PER_TOKEN if key in inputs}
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            self._mask = None
        statistics = clip_statistics(
            self._logps,
            inputs.get("old_per_token_logps", self._logps),
            inputs["advantages"],
            inputs["segments"],
            **clip_limits(self),
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
