"""One short run of the TRL trainer, alone or as a rank of several; also with the sharding broken on purpose."""

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen3ForCausalLM
from trl import GRPOConfig

from credit.adapters.trl import CreditGRPOTrainer
from credit.adapters.trl_rollout import ToolRollout
from tests.credit.adapters import routed
from tests.credit.adapters.scripted import CALLS, END, SCRIPTS, WAITS, ScriptedRollout, record, script_generate

# One group of eight lies across both ranks, and the second rank's rollouts are shorter than the first's.
SHORT = ((1, "Sunny." + END),)
EIGHT = (*SCRIPTS, SHORT, (CALLS, WAITS, *SHORT), SHORT, (CALLS, WAITS, (1, "No." + END)))


def tool_score(slot, **_):
    return [None if s == 7 else float(s * s % 5) for s in slot]


def summary_score(slot, index, **_):
    return [float((3 * s + i) % 7) for s, i in zip(slot, index, strict=True)]


def length(rollout_messages, **_):
    return [float(len(turns)) for turns in rollout_messages]


BOTH = {"tool": [tool_score], "summary": [summary_score]}


class FirstSlice(CreditGRPOTrainer):
    """Mutant: every rank keeps the rows of rank 0."""

    def _route(self, segments, **flags):
        routed = super()._route(segments, **flags)
        rows = len(self.rollout_rows)
        return routed[:rows].repeat(self.accelerator.num_processes, 1)


class LocalSegments(CreditGRPOTrainer):
    """Mutant: a rank does not know which segments the rollouts of the other ranks have."""

    def _route(self, segments, **flags):
        rows, first = len(self.rollout_rows), self.accelerator.process_index * len(self.rollout_rows)
        other = torch.ones(len(segments), dtype=torch.bool)
        other[first : first + rows] = False
        return super()._route(segments.masked_fill(other[:, None], -1), **flags)


TRAINERS = {"genuine": CreditGRPOTrainer, "first slice": FirstSlice, "local segments": LocalSegments}


def results_for(text, tools):
    return ["sunny"] * text.count("<tool_call>")


def run(cls, model_path, folder, ranks, own_tools=False):
    """Train two steps of one group of eight; the advantages and segments per batch, the weights, the log.

    With ``own_tools`` the model itself is scripted: on the last rank no rollout calls a tool.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}?"}], "index": i, "needs_tool": i == 1, "tools": "[]"}
        for i in range(2)
    ]
    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo" if ranks > 1 else None,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        max_steps=2,
        learning_rate=0.5,
        optim="sgd",
        lr_scheduler_type="constant",
        per_device_train_batch_size=8 // ranks,
        num_generations=8,
        num_iterations=1,
        max_completion_length=256,
        gradient_checkpointing=False,
        shuffle_dataset=False,
    )
    rollout = ScriptedRollout(tokenizer, EIGHT)
    turns = []
    if own_tools:
        busy = int(os.environ.get("RANK", 0)) < ranks - 1

        def write(text, row):
            turns.append(row)
            return (CALLS if busy and row == 0 and "<tool_response>" not in text else SHORT[0])[1]

        script_generate(model, tokenizer, write)
        rollout = ToolRollout(results_for)
    trainer = cls(
        model,
        components={"tool": [length], "summary": [length]} if own_tools else BOTH,
        tool_required="needs_tool",
        rollout_func=rollout,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        args=args,
    )
    batches = record(trainer)
    trainer.train()
    kept = [{key: batch[key] for key in ("advantages", "segments")} for batch in batches]
    log = [{k: v for k, v in entry.items() if k.startswith("credit/")} for entry in trainer.state.log_history]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"turns": turns, "batches": kept, "weights": weights, "log": log}


if __name__ == "__main__":
    model_path, folder = sys.argv[1], Path(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results = {name: run(cls, model_path, folder, ranks) for name, cls in TRAINERS.items()}
    results["own tools"] = run(CreditGRPOTrainer, model_path, folder, ranks, own_tools=True)
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    results["routing"] = routed.of_rank(tokenizer, folder, ranks)
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()
