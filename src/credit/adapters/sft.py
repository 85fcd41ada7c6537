"""Supervised fine-tuning with TRL: cross-entropy that counts the tokens of the tool-call protocol once more."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import is_chat_template_stop_token_trained
from trl.data_utils import common_prefix_length, is_conversational
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import global_then_local_main_first, pad

from credit._safe import select, statistics_dtype
from credit.adapters.sft_format import FormatSpans, format_mask, tool_call_format_spans
from credit.adapters.trl_checkpoints import WholeCheckpoints
from credit.supervised import format_weighted_ce


@dataclass
class FormatCollator(DataCollatorForLanguageModeling):  # type: ignore[misc]  # TRL has no types to check against
    """TRL's collator, which makes the target mask (``labels != -100``), and beside it ``format_mask``.

    ``format_mask[B, T]`` is true on protocol tokens that are targets.
    """

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of padded ``input_ids``, ``attention_mask``, ``labels`` and ``format_mask``."""
        batch: dict[str, Any] = super().torch_call(examples)
        for row, example in enumerate(examples):
            marks, tokens = example.get("format_mask"), len(example["input_ids"])
            if marks is None or len(marks) != tokens:
                wrong = "no format_mask" if marks is None else f"a format_mask of {len(marks)} tokens"
                raise ValueError(f"example {row} has {wrong}, but input_ids of {tokens} tokens")
        marks = [torch.tensor(example["format_mask"], dtype=torch.int64) for example in examples]
        padded = pad(marks, padding_value=0, padding_side="right", pad_to_multiple_of=self.pad_to_multiple_of)
        batch["format_mask"] = (padded != 0) & (batch["labels"] != -100)
        return batch


class FormatSFTTrainer(WholeCheckpoints, SFTTrainer):  # type: ignore[misc]
    """TRL's SFT trainer with the format-weighted loss ``CE(assistant tokens) + weight * CE(format tokens)``.

    Each term is a mean over its own tokens, counted over the whole batch: all ranks and accumulated micro-batches. The
    assistant mask comes from the generation markers of TRL's training chat templates, the format mask from characters
    of the rendered conversation and the tokenizer's offsets. The shift by one is TRL's (its fused LM head scores the
    token at ``t`` from ``t - 1``) and happens there only. With ``format_weight=0`` training is stock TRL's.

    Logs ``format_ce`` and ``format_share`` (format tokens among targets) beside TRL's metrics.

    Args:
        model: as for ``SFTTrainer``.
        args: with ``assistant_only_loss=True`` and without packing.
        format_weight: lambda of RIVET stage II.
        format_spans: protocol characters of one assistant turn; the Hermes/Qwen protocol by default.
        **kwargs: everything else of ``SFTTrainer``. Rows hold ``messages``, or ``prompt`` and ``completion``, and
            may hold ``tools`` and ``chat_template_kwargs``. Rows that hold ``input_ids`` as well are taken as
            prepared, and then need ``labels`` and ``format_mask``.

    Raises:
        ValueError: an option or a row the format mask cannot follow, or a chat template that leaves the end-of-turn
            token untrained.

    Example::

        trainer = FormatSFTTrainer(
            "Qwen/Qwen3-0.6B", SFTConfig("out", assistant_only_loss=True), train_dataset=verified_trajectories
        )
        trainer.train()

    Reference:
        RIVET stage II.
    """

    # Declared because TRL, which sets them, is untyped.
    data_collator: Any
    _signature_columns: Any

    def __init__(
        self,
        model: Any,
        args: SFTConfig,
        *,
        format_weight: float = 0.5,
        format_spans: FormatSpans = tool_call_format_spans,
        **kwargs: Any,
    ) -> None:
        _refuse_options(args, kwargs)
        if not (math.isfinite(format_weight) and format_weight >= 0):
            raise ValueError(f"format_weight must be finite and not negative, got {format_weight}")
        self.format_weight, self.format_spans = format_weight, format_spans
        self._format_items: Tensor | None = None
        super().__init__(model, args, **kwargs)
        if not is_chat_template_stop_token_trained(self.processing_class, chat_template=self.chat_template):
            raise ValueError("the chat template leaves the end-of-turn token out of the loss: the model could not stop")
        parallelism = self.accelerator.parallelism_config
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ValueError("context and sequence parallelism shard labels but not format_mask; use data parallelism")
        # TRL's own collator is built first because TRL mirrors its pad token onto the model.
        built = self.data_collator
        self.data_collator = FormatCollator(built.pad_token_id, pad_to_multiple_of=built.pad_to_multiple_of)

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: SFTConfig, packing: bool, formatting_func: Any, name: str
    ) -> Any:
        """Tokens and all masks in one pass; TRL then builds labels from them, drops empty rows and shuffles."""
        row = next(iter(dataset))
        if "input_ids" in row:
            if missing := {"labels", "format_mask"} - row.keys():
                raise ValueError(f"the {name} dataset has input_ids but no {sorted(missing)}")
        elif not is_conversational(row):
            raise ValueError(f"the {name} dataset needs messages, or prompt and completion; it has {sorted(row)}")
        workers = {"num_proc": args.dataset_num_proc} if isinstance(dataset, Dataset) else {}
        encode = partial(_encode, tokenizer=processing_class, chat_template=self.chat_template, spans=self.format_spans)
        with global_then_local_main_first():
            if "input_ids" not in row:
                dataset = dataset.map(encode, **workers)
            if args.max_length is not None:
                keep = slice(args.max_length) if args.truncation_mode == "keep_start" else slice(-args.max_length, None)
                dataset = dataset.map(partial(_truncate, keep=keep), **workers)
        return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, name)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if "format_mask" not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, "format_mask"]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # Format tokens are counted as TRL counts targets, so that shifts, gathers and divisions are the same.
        only_format = [{"labels": batch["labels"].masked_fill(~batch["format_mask"], -100)} for batch in batch_samples]
        self._format_items = super()._get_num_items_in_batch(only_format, device)
        return super()._get_num_items_in_batch(batch_samples, device)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The format-weighted loss, from the forward pass that TRL makes for its own loss and metrics."""
        uncounted = num_items_in_batch is None and self.model.training
        if uncounted and self.current_gradient_accumulation_steps * self.accelerator.num_processes > 1:
            raise ValueError("this model takes no num_items_in_batch, so parts of a batch would average averages")
        forward = _Recorder(model)
        stock = {name: value for name, value in inputs.items() if name != "format_mask"}
        result = super().compute_loss(forward, stock, return_outputs, num_items_in_batch)
        outputs = forward.outputs
        protocol = inputs["format_mask"][:, 1:]
        loss = format_weighted_ce(
            outputs.log_probs,
            outputs.label_mask,
            protocol,
            self.format_weight,
            denominator=num_items_in_batch,
            format_denominator=None if num_items_in_batch is None else self._format_items,
        )
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            # The counts are of every rank and DDP averages gradients, so the average has to be undone.
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        if self.aux_loss_enabled:
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        self._log_format(outputs, protocol)
        return (loss, result[1]) if return_outputs else loss

    def _log_format(self, outputs: Any, protocol: Tensor) -> None:
        dtype = statistics_dtype(outputs.log_probs)
        nll = -select(protocol, outputs.log_probs.detach()).to(dtype).sum()
        sums = torch.stack([nll, protocol.sum().to(dtype), outputs.label_mask.sum().to(dtype)])
        # Not gather_for_metrics: at the end of an epoch it would keep as many sums as the last batch has rows too many.
        nll_sum, tokens, targets = self.accelerator.gather(sums).reshape(-1, 3).sum(dim=0).tolist()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["format_ce"].append(nll_sum / tokens if tokens else 0.0)
        metrics["format_share"].append(tokens / targets if targets else 0.0)


class _Recorder:
    """A model that keeps the output that holds log-probabilities."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.outputs: Any = None

    def __call__(self, **inputs: Any) -> Any:
        outputs = self.model(**inputs)
        if getattr(outputs, "log_probs", None) is not None:
            self.outputs = outputs
        return outputs


def _refuse_options(args: SFTConfig, kwargs: dict[str, Any]) -> None:
    """An error for each option under which the format mask would be lost or the loss would be another one."""
    if not getattr(args, "assistant_only_loss", False):
        raise ValueError("args.assistant_only_loss must be True: format tokens are a part of assistant tokens")
    for option in ("packing", "eval_packing", "padding_free"):
        if getattr(args, option):
            raise ValueError(f"args.{option} drops the format mask; set it to False")
    if args.loss_type != "nll" or args.label_smoothing_factor:
        raise ValueError("the format-weighted loss is loss_type='nll' with label_smoothing_factor=0")
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ValueError("average_tokens_across_devices=False would average the averages of ranks; leave it at True")
    for option in ("data_collator", "compute_loss_func", "formatting_func"):
        if kwargs.get(option) is not None:
            raise ValueError(f"{option} would replace what makes the format mask or the loss; leave it out")


def _encode(row: Mapping[str, Any], tokenizer: Any, chat_template: str | None, spans: FormatSpans) -> dict[str, Any]:
    """Ids as TRL makes them, with the masks of the assistant, the completion and the format."""
    tools = row.get("tools")
    options = {
        "chat_template": chat_template,
        "tools": json.loads(tools) if isinstance(tools, str) else tools,
        **(row.get("chat_template_kwargs") or {}),
    }
    messages = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    encoded = tokenizer.apply_chat_template(
        messages,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
        **options,
    )
    ids, assistant = encoded["input_ids"], encoded["assistant_masks"]
    if 1 not in assistant:
        raise ValueError(f"no token of this row is the assistant's: {text[:200]!r}")
    marks = format_mask(text, encoded["offset_mapping"], assistant, spans)
    result = {"input_ids": ids, "assistant_masks": assistant, "format_mask": marks}
    if "prompt" in row:
        prompt = tokenizer.apply_chat_template(row["prompt"], return_dict=True, add_generation_prompt=True, **options)
        shared = common_prefix_length(prompt["input_ids"], ids)
        result["completion_mask"] = [0] * shared + [1] * (len(ids) - shared)
    return result


def _truncate(row: Mapping[str, Any], keep: slice) -> dict[str, Any]:
    columns = ("input_ids", "labels", "assistant_masks", "completion_mask", "format_mask")
    return {name: row[name][keep] for name in columns if row.get(name) is not None}
