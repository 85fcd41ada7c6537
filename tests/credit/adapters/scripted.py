"""Rollouts fixed in advance, reward functions that read them, and slow references for what training should do."""

import math
import statistics
from pathlib import Path
from types import MethodType

import torch
import trl

TEMPLATES = Path(trl.__file__).parent / "chat_templates"

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
END = "<|im_end|>"
RESULT = "\n<|im_start|>user\n<tool_response>\nsunny <tool_call>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
CALLS, WAITS = (1, CALL + END), (0, RESULT)
# One script for each generation slot of a group: (written by the model, text). The results quote an opening tag.
SCRIPTS = (
    (CALLS, WAITS, (1, "It is sunny." + END)),
    (CALLS, WAITS, CALLS, WAITS, (1, "Sunny in Oslo." + END)),
    ((1, "I think that it is sunny." + END),),
    (CALLS, WAITS, (1, "It is sunny in")),
)
TOOL = (0.9, 0.2, 0.0, 0.4)
SUMMARY = (0.25, 1.0, 0.75, 0.5)


class ScriptedRollout:
    """A TRL rollout function that plays ``scripts`` by the row's place in its group, on any number of ranks."""

    def __init__(self, tokenizer, scripts=SCRIPTS):
        self.prompt = tokenizer
        self.scripts = [
            [(own, tokenizer(text, add_special_tokens=False)["input_ids"]) for own, text in script]
            for script in scripts
        ]

    def __call__(self, prompts, trainer):
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        first = trainer.accelerator.process_index * len(prompts)
        slots = [(first + i) % size for i in range(len(prompts))]
        played = [self.scripts[slot] for slot in slots]
        rendered = self.prompt.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)
        return {
            "prompt_ids": rendered["input_ids"],
            "completion_ids": [[t for _, ids in script for t in ids] for script in played],
            "env_mask": [[own for own, ids in script for _ in ids] for script in played],
            "logprobs": None,
            "slot": slots,
        }


def tool_reward(slot, index, **_):
    return [TOOL[s] + 0.1 * (s == 1) * i for s, i in zip(slot, index, strict=True)]


def summary_reward(slot, index, **_):
    return [SUMMARY[s] - 0.2 * (s == 0) * i for s, i in zip(slot, index, strict=True)]


def script_generate(model, tokenizer, turns):
    """Make ``model.generate`` write ``turns(text so far, row)`` instead of sampling, so that TRL's own loops run."""

    def generate(self, input_ids, attention_mask, generation_config, **_):
        texts = tokenizer.batch_decode(input_ids)
        written = [tokenizer(turns(text, row))["input_ids"] for row, text in enumerate(texts)]
        longest = max(map(len, written))
        pad = tokenizer.pad_token_id
        written = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in written])
        return torch.cat([input_ids, written[:, : generation_config.max_new_tokens]], dim=1)

    model.generate = MethodType(generate, model)


def record(trainer):
    """Every scored batch of ``trainer`` with the rewards of all ranks, as a list that fills while it trains."""
    batches = []
    original = trainer._generate_and_score_completions

    def scored(inputs):
        output = original(inputs)
        kept = {k: v.clone() for k, v in output.items() if isinstance(v, torch.Tensor)}
        batches.append(kept | {"rewards": trainer._scored[0].clone(), "rows": list(inputs)})
        return output

    trainer._generate_and_score_completions = scored
    return batches


def normalised(rewards, size, eps=1e-6):
    """Group-relative advantages in plain Python; ``None`` is absent."""
    out = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        present = [r for r in group if r is not None]
        flat = len(present) < 2 or max(present) == min(present)
        for r in group:
            if r is None or flat:
                out.append(0.0)
            else:
                out.append((r - statistics.fmean(present)) / (statistics.stdev(present) + eps))
    return out


def runs(mask):
    """Token positions of each run of one row."""
    found, open_run = [], False
    for position, own in enumerate(mask):
        if own and not open_run:
            found.append([])
        open_run = bool(own)
        if own:
            found[-1].append(position)
    return found


def slca(tool, summary, masks, size):
    """SLCA's credit of each token in plain Python; rewards are numbers or ``None``."""
    rows = [runs(mask) for mask in masks]
    tool = normalised([r if len(found) > 1 else None for r, found in zip(tool, rows, strict=True)], size)
    summary = normalised([r if found else None for r, found in zip(summary, rows, strict=True)], size)
    credit = [[0.0] * len(mask) for mask in masks]
    for row, found in enumerate(rows):
        for number, positions in enumerate(found):
            for position in positions:
                credit[row][position] = summary[row] if number == len(found) - 1 else tool[row]
    return credit


def none_if_nan(values):
    return [None if math.isnan(v) else v for v in values]


def masks_of(batch):
    mask = batch["completion_mask"]
    return (mask * batch["tool_mask"] if "tool_mask" in batch else mask).tolist()
