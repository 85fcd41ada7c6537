"""Supervised warm-up: format-weighted cross-entropy on conversations that are efficient and wasteful by halves."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Example:
    """One conversation as ids, with the tokens that are trained and those of the call protocol among them."""

    ids: list[int]
    trained: list[bool]
    protocol: list[bool]


def encode(messages: list[dict[str, Any]], tools: list[dict[str, Any]], tokenizer: Any) -> Example:
    """Render a conversation and mark its tokens.

    Trained: every assistant token, the end of turn included. Protocol: those of `credit.adapters.sft_format`, as
    `FormatSFTTrainer` counts them.
    """
    from trl.chat_template_utils import get_training_chat_template

    from credit.adapters.sft_format import format_mask

    options = {"tools": tools or None, "chat_template": get_training_chat_template(tokenizer)}
    rendered = tokenizer.apply_chat_template(
        messages,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
        **options,
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    written = rendered["assistant_masks"]
    protocol = format_mask(text, rendered["offset_mapping"], written)
    return Example(rendered["input_ids"], [bool(token) for token in written], [bool(token) for token in protocol])


def train(
    model: Any,
    examples: Sequence[Example],
    *,
    steps: int,
    batch_size: int = 16,
    learning_rate: float = 3e-3,
    format_weight: float = 0.5,
    seed: int = 0,
    pad: int = 0,
    progress: Progress | None = None,
) -> list[float]:
    """Minimise `CE(trained) + format_weight · CE(protocol)`.

    Args:
        model: a causal language model; trained in place.
        examples: conversations to draw from, with replacement.
        steps: optimiser steps; the rate warms up over a tenth of them and then falls to 0 along a cosine.
        batch_size: conversations a step.
        learning_rate: peak rate of AdamW.
        format_weight: λ of RIVET stage II.
        seed: seed of the draw.
        pad: id to fill up with.
        progress: called after each step with its number and loss.

    Returns:
        The loss of every step.
    """
    from credit import format_weighted_ce

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    model.train()
    losses = []
    for step in range(steps):
        chosen = collate(rng.choices(examples, k=batch_size), pad)
        ids, attention, trained, protocol = (tensor.to(model.device) for tensor in chosen)
        # The only shift by one: position t predicts token t + 1.
        logits = model(input_ids=ids[:, :-1], attention_mask=attention[:, :-1]).logits
        logp = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss = format_weighted_ce(logp, trained[:, 1:], protocol[:, 1:], format_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        if progress is not None:
            progress(step + 1, losses[-1])
    return losses


def collate(examples: Sequence[Example], pad: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Right-padded ids, attention, trained and protocol masks, each `[batch, tokens]`."""
    width = max(len(example.ids) for example in examples)

    def filled(rows: Sequence[Sequence[Any]], value: Any) -> Tensor:
        return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])

    ids = filled([example.ids for example in examples], pad)
    attention = filled([[1] * len(example.ids) for example in examples], 0)
    trained = filled([example.trained for example in examples], False)
    return ids, attention, trained, filled([example.protocol for example in examples], False)
