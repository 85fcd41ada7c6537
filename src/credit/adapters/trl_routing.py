"""Where TRL's trainer meets expert routing control: the protocol it calls, and the places where it calls it."""

import os
import warnings
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from credit._safe import as_mask
from credit.adapters.trl_checkpoints import WholeCheckpoints
from credit.adapters.trl_ranks import require_own_rows
from credit.segments import run_ids

FIELD = "routing_field"
STATE_FILE = "routing_state.pt"
METHODS = ("label", "record", "close", "bind", "metrics", "state_dict", "load_state_dict")


@runtime_checkable
class RoutingHook(Protocol):
    """What the trainer asks of routing control, in this order; ``moe_routing.adapters.trl.TurnRouting`` fulfils it.

    Every rank calls each method equally often, so ``close`` may talk to the other ranks.
    """

    def label(
        self, completion_ids: Int[Tensor, "batch tokens"], turn: Int[Tensor, "batch tokens"], tokenizer: Any
    ) -> Int[Tensor, "batch tokens"]:
        """Open this rank's generation batch: the field id of each completion token, -1 outside fields.

        ``turn`` numbers the model's own runs of each row, -1 on everything else.
        """

    def record(self, field: Int[Tensor, "batch tokens"]) -> AbstractContextManager[None]:
        """Around one forward under the old policy; ``field`` covers prompt and completion."""

    def close(self, entropies: Float[Tensor, "batch tokens"], field: Int[Tensor, "batch tokens"]) -> None:
        """End of those forwards: policy entropy and field id of each completion token of this rank."""

    def bind(self, field: Int[Tensor, "batch tokens"], *, scale: float) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; ``scale`` turns a gradient of the loss into one at hand."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the trainer's log, since the last call."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, alike on all ranks, in the types that ``torch.load(weights_only=True)`` reads."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken; called on every rank."""


class RoutedGRPOTrainer(WholeCheckpoints, GRPOTrainer):  # type: ignore[misc]  # TRL has no types to check against
    """TRL's GRPO trainer that lets a :class:`RoutingHook` watch the old policy and act in the backward pass.

    Statistics come from the forward that TRL runs under the old policy. Where it runs none (it generates once an
    optimizer step, and without vLLM's correction), one forward without gradient is added for each generation
    batch, and ``routing/added_forward`` is logged as 1. The hook's state goes into the checkpoints that hold the
    optimizer's. With ``routing=None`` this is TRL's trainer.
    """

    routing: RoutingHook | None = None
    _recording = False
    _tool_mask: list[list[int]] | None = None
    _binding: ExitStack | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_own_rows(self)

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        self._tool_mask = generated[2]
        return generated

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.routing is None or not self.model.training:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            return output
        self._recording = self._scores_old_policy()
        try:
            output = super()._generate_and_score_completions(inputs)
            added = "old_per_token_logps" not in output
            if added == self._scores_old_policy():
                raise RuntimeError("this version of TRL scores the old policy at other times than routing expects")
            if added:
                self._add_forward(output)
        finally:
            self._recording = False
        output[FIELD] = self._field
        self._metrics["train"]["routing/added_forward"].append(float(added))
        return output

    def _scores_old_policy(self) -> bool:
        """TRL's own condition. The reference policy may be the same model object, so the call does not tell."""
        every = self.args.steps_per_generation * self.num_iterations
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        return bool(self.args.gradient_accumulation_steps % every != 0 or corrects)

    def _add_forward(self, output: dict[str, Any]) -> None:
        self._recording = True
        device = self.accelerator.device
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
            # What is drawn after this forward (dropout, the order of rows) is what TRL would have drawn.
            torch.random.fork_rng(
                [] if device.type == "cpu" else [device], device_type="cuda" if device.type == "cpu" else device.type
            ),
        ):
            self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                output["completion_ids"].shape[1],
                batch_size=self.args.per_device_train_batch_size,
                **{key: output[key] for key in ("pixel_values", "num_images") if key in output},
            )

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Int[Tensor, "batch all"],
        attention_mask: Int[Tensor, "batch all"],
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> Any:
        score = super()._get_per_token_logps_and_entropies
        if self.routing is None or not self._recording:
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **kwargs)
        self._recording = False  # the reference policy is scored next
        more = sorted(key for key, value in kwargs.items() if value is not None and value is not False)
        if more:
            raise NotImplementedError(f"routing reads text batches only, but TRL passes {more} to the model")
        self._field = self._label(input_ids[:, -logits_to_keep:], attention_mask[:, -logits_to_keep:])
        field = over_prompt(self._field, input_ids.shape[1])
        parts = []
        for rows in torch.split(torch.arange(len(input_ids)), batch_size or len(input_ids)):
            with self.routing.record(field[rows]):
                parts.append(score(model, input_ids[rows], attention_mask[rows], logits_to_keep, None, True))
        logps, entropies = (torch.cat([part[i] for part in parts]) for i in range(2))
        self.routing.close(entropies, self._field)
        return logps, entropies, None

    def _label(
        self, ids: Int[Tensor, "batch tokens"], completion_mask: Int[Tensor, "batch tokens"]
    ) -> Int[Tensor, "batch tokens"]:
        assert self.routing is not None
        own = as_mask(completion_mask)
        if self._tool_mask is not None:
            width = ids.shape[1]
            rows = [pad(torch.tensor(row, dtype=torch.long), (0, width - len(row)), value=1) for row in self._tool_mask]
            own = own & as_mask(torch.stack(rows).to(own.device))
        return self.routing.label(ids, run_ids(own), self._tokenizer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # TRL generates in here, then runs the forward, then the backward. Binding opens at the forward.
        try:
            with ExitStack() as self._binding:
                loss = super().training_step(*args, **kwargs)
        finally:
            self._binding = None
        if self.routing is not None:
            for name, value in self.routing.metrics().items():
                self._metrics["train"][name].append(value)
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.routing is not None and self._binding is not None and FIELD in inputs:
            width = inputs["prompt_ids"].shape[1] + inputs[FIELD].shape[1]
            field = over_prompt(inputs[FIELD], width)
            self._binding.enter_context(self.routing.bind(field, scale=self._gradient_scale()))
        loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.routing is not None and self.args.should_save:
            torch.save(self.routing.state_dict(), os.path.join(output_dir, STATE_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.routing is None or checkpoint is None:
            return
        path = os.path.join(checkpoint, STATE_FILE)
        if os.path.isfile(path):
            self.routing.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        else:
            message = f"{checkpoint} holds no {STATE_FILE}: routing control starts anew"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _gradient_scale(self) -> float:
        """What stands between the gradient in this backward and that of the whole generation batch.

        Ranks, each of which holds rows of its own (``require_own_rows``), are averaged; fp16 losses are scaled; and
        where an optimizer step takes only some micro-batches of a generation batch, or those of several, the terms
        weigh as the losses do.
        """
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is None and self.accelerator.mixed_precision == "fp16":
            raise NotImplementedError(
                "routing needs the scale of the fp16 loss, which this engine (DeepSpeed) keeps to itself; train in bf16"
            )
        loss_scale = 1.0 if scaler is None else float(scaler.get_scale())
        share = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        return float(self.accelerator.num_processes * loss_scale * share)


def over_prompt(field: Int[Tensor, "batch tokens"], width: int) -> Int[Tensor, "batch width"]:
    """Field ids of prompt and completion, as the routers see them, from those of the completion.

    Example:
        >>> over_prompt(torch.tensor([[0, 1]]), 4)
        tensor([[-1, -1,  0,  1]])
    """
    return pad(field, (width - field.shape[1], 0), value=-1)


def require_hook(routing: Any) -> RoutingHook | None:
    """``routing`` itself, if it is a hook or None.

    Raises:
        TypeError: it lacks methods; the message names them.

    Example:
        >>> require_hook("RoutingControl")
        Traceback (most recent call last):
        TypeError: routing is a str without label, record, close, bind, metrics, state_dict, load_state_dict; wrap a
        RoutingControl in TurnRouting
    """
    missing = [name for name in METHODS if not hasattr(routing, name)]
    if routing is not None and missing:
        raise TypeError(
            f"routing is a {type(routing).__name__} without {', '.join(missing)}; wrap a RoutingControl in TurnRouting"
        )
    hook: RoutingHook | None = routing
    return hook
