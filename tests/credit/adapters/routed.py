"""One optimizer step of TRL's trainer on a tiny mixture of experts, and what routing control should add to it."""

import itertools
import os

import torch
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback
from transformers.distributed import DistributedConfig
from trl import GRPOConfig

import moe_routing as mr
from credit.adapters.trl import CreditGRPOTrainer
from moe_routing.adapters.transformers import RoutingControl
from moe_routing.adapters.trl import TurnRouting
from tests.credit.adapters.scripted import END, WAITS, ScriptedRollout, record, summary_reward, tool_reward

SEARCH = '<tool_call>\n{"name": "search_mail", "arguments": {"text": "Oslo"}}\n</tool_call>'
DELETE = '<tool_call>\n{"name": "delete_mail", "arguments": {"id": 7}}\n</tool_call>'
SCRIPTS = (
    ((1, "I look for it. " + SEARCH + END), WAITS, (1, "It is sunny." + END)),
    ((1, SEARCH + END), WAITS, (1, "Away with it. " + DELETE + END), WAITS, (1, "Done in Oslo." + END)),
    ((1, "I think that it is sunny." + END),),
    ((1, DELETE + "\n" + SEARCH + END), WAITS, (1, "It is sunny in")),
)
# Operations of each turn, by script.
OPERATIONS = (("read", ""), ("read", "delete", ""), ("",), ("read delete", ""))
STRONG = {"lambda_turn": 30.0, "lambda_token": 3.0, "gap_threshold": 1.0, "gate": None}


def tiny_moe(tokenizer, adapter=False):
    """The model, or the same under a LoRA adapter on its attention, which alone is trained."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        router_aux_loss_coef=0.0,
        experts_implementation="eager",
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.normal_(std=0.5)  # a random router is all but uniform, and then nothing is to be seen
    if not adapter:
        return model
    from peft import LoraConfig, get_peft_model

    # Both factors are random, so that each gets a gradient.
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, lora)


def spread_moe(folder):
    """The model that lies in ``folder``, on two ranks: its experts by expert, the rest and the rows as FSDP does."""
    layout = DistributedConfig(fsdp_size=2, ep_size=2)
    return Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="batched_mm", distributed_config=layout
    )


def whole(gradient):
    """The gradient itself, put together if it lies on several ranks."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


class Gradients(TrainerCallback):
    """Keeps the gradient of every optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        model = getattr(model, "module", model)
        self.steps.append({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})


def length(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def train(
    tokenizer,
    folder,
    routing=None,
    ranks=1,
    scripted=True,
    adapter=False,
    prompts=2,
    resume=None,
    model=None,
    **changes,
):
    """Train one step; the trainer, its scored batches, the gradients of each step, and the hook.

    Without ``scripted`` rollouts the model itself generates; ``resume`` is a checkpoint to go on from.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    model = tiny_moe(tokenizer, adapter) if model is None else model
    rewards = {"tool": [tool_reward], "summary": [summary_reward]}
    questions = ["Weather?", "What is the weather in Oslo today?", "Sunny?", "Is it sunny in Oslo?"][:prompts]
    rows = [{"prompt": [{"role": "user", "content": q}], "index": i} for i, q in enumerate(questions)]
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "ddp_backend": "gloo" if ranks > 1 else None,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 4 // ranks,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 256,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "seed": 3,
    }
    gradients, hook = Gradients(), None
    control = None if routing is None else RoutingControl(model, **routing)
    try:
        hook = None if control is None else TurnRouting(control)
        trainer = CreditGRPOTrainer(
            model,
            components=rewards if scripted else {"tool": [length], "summary": [length]},
            rollout_func=ScriptedRollout(tokenizer, SCRIPTS) if scripted else None,
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows) if "eval_strategy" in changes else None,
            processing_class=tokenizer,
            args=GRPOConfig(**(settings | changes)),
            callbacks=[gradients],
            routing=hook,
        )
        batches = record(trainer)
        trainer.train(resume_from_checkpoint=resume)
    finally:
        if control is not None:
            control.detach()
    return trainer, batches, gradients.steps, hook


def difference(routed, plain):
    """What routing added to the gradient."""
    return {name: routed[name] - plain[name] for name in plain}


def assert_close(got, want, tolerance=1e-5):
    assert got.keys() == want.keys()
    scale = max(float(g.abs().max()) for g in want.values())
    assert scale > 0
    assert max(float((got[name] - want[name]).abs().max()) for name in want) <= tolerance * scale


def turns_of(batch, tokenizer):
    """Fields of a scored batch in plain Python, from the scripts: positions in prompt and completion, by field."""
    opening, closing = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<tool_call>", "</tool_call>"))
    width, fields = batch["prompt_ids"].shape[1], {}
    for row, ids in enumerate(batch["completion_ids"].tolist()):
        if not batch["completion_mask"][row].any():  # truncated, and left out
            continue
        at, turn = 0, 0
        for own, text in SCRIPTS[row % 4]:
            inside = False
            for _ in tokenizer(text, add_special_tokens=False)["input_ids"]:
                inside = inside or ids[at] == opening
                if own:
                    kind = "tool" if inside else "think"
                    fields.setdefault((row, turn, kind), []).append(width + at)
                inside = inside and ids[at] != closing
                at += 1
            turn += own
    return fields


def policy_entropy(batch, tokenizer):
    """Mean entropy of the distributions that the model's own tokens were drawn from."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = tiny_moe(tokenizer).train()(input_ids=ids, attention_mask=mask).logits
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    own = [(row, at) for (row, _, _), places in turns_of(batch, tokenizer).items() for at in places]
    return sum(float(entropy[row, at - 1]) for row, at in own) / len(own)


def information(usage, has):
    """``pmi(e, y)`` of the turns' usages, from counts in plain Python."""
    mean = sum(usage) / len(usage)
    pmi = {}
    for y in (False, True):
        joint = sum((q for q, h in zip(usage, has, strict=True) if h == y), torch.zeros_like(mean)) / len(usage)
        share = sum(h == y for h in has) / len(usage)
        pmi[y] = ((joint + 1e-12) / (mean * share + 1e-12)).log().clamp(-20, 20)
    return pmi


def objective(model, batch, tokenizer, lambda_turn, lambda_token, gap_threshold, gate):
    """The control's objective over the whole batch, differentiable through the model; fewer than 8 turns are none."""
    fields = turns_of(batch, tokenizer)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=mask, output_router_logits=True).router_logits
    assert gap_threshold == 1.0  # every pair takes part
    assert gate is None
    pairs = [(key[0], a, b) for key, at in fields.items() for a, b in itertools.pairwise(at) if b == a + 1]
    total = torch.zeros(())
    for z in logits:
        p = torch.softmax(z, dim=-1).reshape(*ids.shape, -1)
        for kind in ("think", "tool"):
            keys = [key for key in fields if key[2] == kind]
            usage = [p[key[0], fields[key]].mean(0).detach() for key in keys]
            for operation in ("read", "delete") if len(keys) >= 8 else ():
                has = [operation in OPERATIONS[key[0] % 4][key[1]] for key in keys]
                pmi = information(usage, has)
                for key, h in zip(keys, has, strict=True):
                    total = total + lambda_turn * (p[key[0], fields[key]].mean(0) * pmi[h]).sum() / len(keys)
        for row, a, b in pairs:
            chosen = p[row, a].topk(2).indices
            q = (p[row, a, chosen] / p[row, a, chosen].sum()).detach()
            total = total + lambda_token * (q * p[row, b, chosen].log()).sum() / len(pairs)
    return total


def four_steps(tokenizer, folder, ranks=1, checkpoint=None):
    """Four steps, or the last two of them from the checkpoint that the whole run left: what they did and logged.

    The policy's entropy falls, so that the gate is shut in the first three steps and open in the last; one that
    began anew would be open in the third, where only the hysteresis keeps it shut.
    """
    gate = mr.EntropyGate(0.0, 5.99, hysteresis=0.04)
    changes = {"max_steps": 4, "learning_rate": 3.0, "save_strategy": "steps", "save_steps": 2}
    resume = None if checkpoint is None else str(folder / checkpoint)
    trainer, _, gradients, hook = train(tokenizer, folder, STRONG | {"gate": gate}, ranks, resume=resume, **changes)
    log = [
        {key: value for key, value in entry.items() if key.startswith(("routing/", "credit/"))}
        for entry in trainer.state.log_history[:4]
    ]
    return {"gradients": gradients, "log": log, "state": hook.state_dict()}


def of_rank(tokenizer, folder, ranks):
    """What routing injects and logs on one rank of several."""
    _, _, (plain,), _ = train(tokenizer, folder, ranks=ranks)
    trainer, _, (routed,), _ = train(tokenizer, folder, STRONG, ranks=ranks)
    log = {k: v for k, v in trainer.state.log_history[0].items() if k.startswith("routing/")}
    first, rest = (four_steps(tokenizer, folder / "resumed", ranks, at) for at in (None, "checkpoint-2"))
    if torch.distributed.get_rank() == 0:
        tiny_moe(tokenizer).save_pretrained(folder / "model")
    torch.distributed.barrier()
    _, _, (spread,), _ = train(tokenizer, folder, STRONG, ranks=ranks, model=spread_moe(folder / "model"))
    injected, spread = (difference(steered, plain) for steered in (routed, spread))
    return {"injected": injected, "spread": spread, "log": log, "whole": first, "resumed": rest}
