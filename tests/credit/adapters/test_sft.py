"""TRL's SFT trainer with the format-weighted loss: real training on a tiny model."""

import json
import multiprocessing
import os
import socket
from functools import partial

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import SFTConfig, SFTTrainer

from credit.adapters.sft import FormatCollator, FormatSFTTrainer
from credit.adapters.sft_format import format_mask, tool_call_format_spans

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def conversation(row: int) -> dict[str, object]:
    """A row with a call, except every third; the answers have unequal lengths."""
    city = "Oslo" * (1 + row % 3)
    answer = {"role": "assistant", "content": "It is sunny. " * (1 + row)}
    if row % 3 == 2:
        return {"messages": [{"role": "user", "content": "Hi?"}, answer], "tools": "[]"}
    call = {"type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
    return {
        "messages": [
            {"role": "user", "content": f'Weather in {city}? Not <tool_call>{{"name": "x"}}</tool_call>.'},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "weather", "content": '{"name": "sun"}'},
            answer,
        ],
        "tools": json.dumps([WEATHER]),
    }


@pytest.fixture(scope="module")
def rows():
    return Dataset.from_list([conversation(row) for row in range(12)])


@pytest.fixture
def config(tmp_path):
    def make(**changes):
        settings = {
            "output_dir": str(tmp_path / "run"),
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": 1,
            "max_steps": 3,
            "learning_rate": 0.05,
            "optim": "sgd",
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "per_device_train_batch_size": 4,
            "gradient_checkpointing": False,
            "assistant_only_loss": True,
            "seed": 3,
        }
        return SFTConfig(**(settings | changes))

    return make


@pytest.fixture
def build(model_path, tokenizer, config, rows):
    """A trainer on a fresh copy of the tiny model."""
    from transformers import Qwen3ForCausalLM

    def make(cls=FormatSFTTrainer, model=None, dataset=None, trainer=None, **changes):
        fresh = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32) if model is None else model
        return cls(
            fresh,
            config(**changes),
            train_dataset=rows if dataset is None else dataset,
            processing_class=tokenizer,
            **(trainer or {}),
        )

    return make


def weights(trainer):
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# The protocol's characters and tokens.


def pieces(text, **options):
    return [text[start:stop] for start, stop in tool_call_format_spans(text, **options)]


def test_the_protocol_is_tags_keys_names_and_argument_keys():
    text = 'Hm.<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": {"name": "c"}}}\n</tool_call>'
    assert pieces(text) == ["<tool_call>", '"name"', "f", '"arguments"', '"a"', '"b"', "</tool_call>"]
    assert pieces(text, names=False, argument_keys=False) == [
        "<tool_call>",
        '"name"',
        '"arguments"',
        "</tool_call>",
    ]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", []),
        ("no call, only </tool_call>", []),
        ('<think>I could <tool_call>{"name": "f"}</tool_call></think>', []),
        ('<think>cut <tool_call>{"name": "f"}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
         ["<tool_call>", '"name"', "f", '"arguments"', '"x"', "</tool_call>"]),
        ('<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>',
         ["<tool_call>", '"name"', "f", '"name"', "g", "</tool_call>"]),
        ('<tool_call>[{"name": "f"}, {"parameters": {"x": []}, "name": "g"}]</tool_call>',
         ["<tool_call>", '"name"', "f", '"parameters"', '"x"', '"name"', "g", "</tool_call>"]),
        ('<tool_call>{"name": "f</tool_call><tool_call>{"name": "g"}</tool_call>',
         ["<tool_call>", "<tool_call>", '"name"', "g", "</tool_call>"]),
        ('<tool_call>{"x\\"name": "f"}</tool_call>', ["<tool_call>", "</tool_call>"]),
        ("<tool_call></tool_call>", ["<tool_call>", "</tool_call>"]),
        ('<tool_call>{"name": {"x": "y"}}</tool_call>', ["<tool_call>", '"name"', "</tool_call>"]),
    ],
)  # fmt: skip
def test_tags_in_strings_reasoning_and_broken_json(text, wanted):
    assert pieces(text) == wanted


def test_only_the_assistants_own_calls_count_and_tokens_count_whole():
    text = "<tool_call> <tool_call>"
    assert format_mask(text, [(0, 11), (11, 15), (15, 23)], [0, 1, 1]) == [0, 1, 1]
    assert format_mask(text, [(0, 11), (11, 12), (12, 23)], [0, 1, 1]) == [0, 0, 1]
    assert format_mask(text, [(0, 11), (11, 12), (12, 23)], [0, 0, 0]) == [0, 0, 0]
    # Two tokens share a character; only one of them is the assistant's.
    assert format_mask("é", [(0, 1), (0, 1)], [0, 1], lambda text: [(0, 1)]) == [0, 1]
    with pytest.raises(ValueError, match="offsets has 1 tokens, assistant has 2"):
        format_mask(text, [(0, 11)], [0, 1])


# What is trained.


def prepared(trainer, *columns):
    dataset = trainer.train_dataset
    return sorted(tuple(tuple(row[name]) for name in columns) for row in dataset)


def test_ids_and_labels_are_trls_own(build):
    for changes in ({}, {"max_length": 90}, {"max_length": 60, "truncation_mode": "keep_end"}):
        ours, stock = build(**changes), build(SFTTrainer, **changes)
        assert prepared(ours, "input_ids", "labels") == prepared(stock, "input_ids", "labels")
        assert all(len(row["format_mask"]) == len(row["input_ids"]) for row in ours.train_dataset)


def test_prompt_and_completion_rows_train_as_trls_do(build, rows):
    split = rows.map(
        lambda row: {"prompt": row["messages"][:1], "completion": row["messages"][1:]}, remove_columns="messages"
    )
    ours, stock = build(dataset=split), build(SFTTrainer, dataset=split)
    assert prepared(ours, "input_ids", "labels") == prepared(stock, "input_ids", "labels")
    assert any(1 in row["format_mask"] for row in ours.train_dataset)


def test_the_end_of_turn_is_trained_and_quoted_calls_are_not_protocol(build, tokenizer):
    trainer = build()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(12)])
    ids, targets, protocol = batch["input_ids"], batch["labels"] != -100, batch["format_mask"]
    assert not (protocol & ~targets).any()
    end = ids == tokenizer.eos_token_id
    assert (end & targets).sum(dim=1).tolist() == (targets.int().diff(dim=1) == 1).sum(dim=1).tolist()
    tag = ids == tokenizer.convert_tokens_to_ids("<tool_call>")
    assert (tag & protocol).sum(dim=1).unique().tolist() == [0, 1]
    assert (tag & ~protocol).any()
    for row in range(len(ids)):
        runs = tokenizer.decode(ids[row][protocol[row]])
        assert not protocol[row].any() or runs.startswith("<tool_call>")
        assert "Oslo" not in runs
        assert not protocol[row].any() or all(part in runs for part in ("name", "weather", "arguments", "city"))


def test_weight_0_trains_stock_trls_parameters(build):
    ours, stock = build(trainer={"format_weight": 0.0}), build(SFTTrainer)
    before = weights(ours)
    ours.train()
    stock.train()
    assert largest_difference(before, weights(stock)) > 1e-3
    assert largest_difference(weights(ours), weights(stock)) < 1e-7


def test_a_weight_trains_other_parameters_and_logs_its_term(build):
    ours, stock = build(), build(SFTTrainer)
    ours.train()
    stock.train()
    assert largest_difference(weights(ours), weights(stock)) > 1e-4
    first, theirs = ours.state.log_history[0], stock.state.log_history[0]
    assert first["loss"] == pytest.approx(theirs["loss"] + 0.5 * first["format_ce"], abs=1e-4)
    assert 0 < first["format_share"] < 1


def test_the_loss_is_the_formula(build):
    """Against logits of the plain forward pass, token by token, in float64."""
    trainer = build(trainer={"format_weight": 0.7})
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, dict(batch))
        again, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
        logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert torch.equal(loss, again)
    assert torch.equal(outputs.logits, logits)
    logp = logits.double().log_softmax(dim=-1)
    every, protocol = [], []
    for row in range(4):
        for t in range(1, batch["labels"].shape[1]):
            if batch["labels"][row, t] != -100:
                every.append(-logp[row, t - 1, batch["input_ids"][row, t]])
                if batch["format_mask"][row, t]:
                    protocol.append(every[-1])
    wanted = sum(every) / len(every) + 0.7 * sum(protocol) / len(protocol)
    assert float(loss) == pytest.approx(float(wanted), abs=1e-5)


def test_micro_batches_of_any_size_give_the_same_update(build):
    """Rows of unequal length, a third of them without a format token; counts are of the whole batch."""
    after = []
    for size in (4, 2, 1):
        trainer = build(per_device_train_batch_size=size, gradient_accumulation_steps=4 // size)
        trainer.train()
        after.append(weights(trainer))
    assert largest_difference(after[0], after[1]) < 1e-6
    assert largest_difference(after[0], after[2]) < 1e-6


def test_a_mean_of_means_would_be_seen(build, monkeypatch):
    """The mutant that counts format tokens in each micro-batch alone fails the test above."""
    whole = build()
    whole.train()
    split = build(per_device_train_batch_size=1, gradient_accumulation_steps=4)
    count = split._get_num_items_in_batch

    def forget(samples, device):
        total = count(samples, device)
        split._format_items = None
        return total

    monkeypatch.setattr(split, "_get_num_items_in_batch", forget)
    split.train()
    assert largest_difference(weights(whole), weights(split)) > 1e-4


def test_rows_without_a_format_token_train_like_stock(build, rows):
    plain = rows.filter(lambda row: len(row["messages"]) == 2)
    ours, stock = build(dataset=plain), build(SFTTrainer, dataset=plain)
    ours.train()
    stock.train()
    assert largest_difference(weights(ours), weights(stock)) < 1e-7
    assert ours.state.log_history[0]["format_ce"] == 0.0


def test_the_last_batch_of_an_epoch_may_be_short(build, rows, monkeypatch):
    """Five rows in batches of four, in training and in evaluation."""
    shares, compute = [], FormatSFTTrainer.compute_loss

    def seen(self, model, inputs, *args, **kwargs):
        marked, targets = inputs["format_mask"][:, 1:], inputs["labels"][:, 1:] != -100
        shares.append(float(marked.sum() / targets.sum()))
        return compute(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(FormatSFTTrainer, "compute_loss", seen)
    five = rows.select(range(5))
    trainer = build(dataset=five, max_steps=2, per_device_eval_batch_size=4)
    trainer.train()
    assert [entry["format_share"] for entry in trainer.state.log_history[:2]] == pytest.approx(shares)
    shares.clear()
    prepared = trainer._prepare_dataset(five, trainer.processing_class, trainer.args, False, None, "eval")
    logged = trainer.evaluate(prepared)
    assert len(shares) == 2
    assert logged["eval_format_share"] == pytest.approx(sum(shares) / 2)


def test_evaluation_reports_the_same_loss(build, rows):
    trainer = build(trainer={"eval_dataset": rows.select(range(4))}, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    batch = trainer.data_collator([trainer.eval_dataset[i] for i in range(4)])
    trainer.model.eval()
    with torch.no_grad():
        wanted = float(trainer.compute_loss(trainer.model, batch))
    assert metrics["eval_loss"] == pytest.approx(wanted, abs=1e-5)
    assert metrics["eval_format_ce"] > 0


@pytest.fixture
def moe(tokenizer):
    """Makes a mixture of experts, the same each time."""

    def make():
        torch.manual_seed(1)
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=len(tokenizer),
                hidden_size=16,
                intermediate_size=16,
                moe_intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                router_aux_loss_coef=0.1,
                pad_token_id=tokenizer.pad_token_id,
            )
        )

    return make


def test_a_resumed_mixture_of_experts_ends_where_the_whole_run_does(build, moe, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    whole, resumed = build(model=moe(), **saved), build(model=moe(), **saved)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert largest_difference(weights(whole), weights(resumed)) == 0.0


def test_the_auxiliary_loss_of_a_mixture_of_experts_stays(build, moe):
    accumulate = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1}
    ours = build(model=moe(), trainer={"format_weight": 0.0}, **accumulate)
    stock = build(SFTTrainer, model=moe(), **accumulate)
    ours.train()
    stock.train()
    assert ours.aux_loss_enabled
    assert largest_difference(weights(ours), weights(stock)) < 1e-7


def train_rank(rank, port, build, out):
    """One of two gloo ranks; forked, because importing TRL anew takes longer than the training."""
    AcceleratorState._reset_state(reset_partial_state=True)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    trainer = build(max_steps=2, per_device_train_batch_size=1, gradient_accumulation_steps=2, ddp_backend="gloo")
    trainer.train()
    assert trainer.accelerator.num_processes == 2
    if rank == 0:
        torch.save(weights(trainer), out)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_ranks_train_like_one(build, tmp_path):
    port, out = free_port(), tmp_path / "two.pt"
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=train_rank, args=(rank, port, build, out)) for rank in range(2)]
    for process in started:
        process.start()
    try:
        for process in started:
            process.join(timeout=90)
            assert process.exitcode == 0
    finally:
        for process in started:
            process.kill()
    one = build(max_steps=2)
    one.train()
    assert largest_difference(weights(one), torch.load(out)) < 1e-6


def test_streamed_rows_train_the_same(build, rows):
    streamed, mapped = build(dataset=rows.to_iterable_dataset(), max_steps=2), build(max_steps=2, shuffle_dataset=False)
    streamed.train()
    batch = streamed.data_collator(list(streamed.train_dataset)[:4])
    ids = mapped.data_collator([mapped.train_dataset[i] for i in range(4)])
    assert all(torch.equal(batch[name], ids[name]) for name in ("input_ids", "labels", "format_mask"))
    assert streamed.state.log_history[0]["format_share"] > 0


# Bad input.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"assistant_only_loss": False}, "assistant_only_loss must be True"),
        ({"packing": True}, "args.packing drops the format mask"),
        ({"eval_packing": True}, "args.eval_packing drops"),
        ({"padding_free": True, "max_length": None}, "args.padding_free drops"),
        ({"loss_type": "dft"}, "loss_type='nll'"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0"),
        ({"trainer": {"formatting_func": str}}, "formatting_func would replace"),
        ({"trainer": {"data_collator": FormatCollator(0)}}, "data_collator would replace"),
        ({"trainer": {"format_weight": float("nan")}}, "format_weight must be finite"),
        ({"trainer": {"format_weight": -1.0}}, "format_weight must be finite and not negative"),
    ],
)
def test_options_that_would_lose_the_mask_are_refused(build, changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_ranks_that_would_average_averages_are_refused(build, monkeypatch):
    build(average_tokens_across_devices=False)
    monkeypatch.setattr(SFTConfig, "world_size", 2)
    with pytest.raises(ValueError, match="would average the averages of ranks"):
        build(average_tokens_across_devices=False)


@pytest.mark.parametrize(("steps", "ranks"), [(2, 1), (1, 2)])
def test_a_model_that_takes_no_count_is_refused(build, monkeypatch, steps, ranks):
    trainer = build()
    trainer.current_gradient_accumulation_steps = steps
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", ranks)
    with pytest.raises(ValueError, match="would average averages"):
        trainer.compute_loss(trainer.model.train(), {}, num_items_in_batch=None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "plain"}, "conversational|needs messages"),
        ({**conversation(2), "input_ids": [1, 2], "labels": [1, 2]}, r"input_ids but no \['format_mask'\]"),
        ({"messages": [{"role": "user", "content": "only a question"}]}, "no token of this row is the assistant's"),
    ],
)
def test_rows_the_mask_cannot_follow_are_errors(build, row, message):
    with pytest.raises(ValueError, match=message):
        build(dataset=Dataset.from_list([row]))


def test_prepared_rows_are_left_as_they_are(build):
    ready = {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8], "format_mask": [1, 0, 1, 0]}
    trainer = build(dataset=Dataset.from_list([{**conversation(2), **ready}] * 4))
    assert {name: trainer.train_dataset[0][name] for name in ready} == ready


def test_the_collator_names_the_row_whose_mask_does_not_fit():
    good = {"input_ids": [5, 6], "labels": [-100, 6], "format_mask": [1, 1]}
    collate = FormatCollator(0, pad_to_multiple_of=4)
    batch = collate([good, {**good, "input_ids": [5], "labels": [5], "format_mask": [0]}])
    assert batch["format_mask"].tolist() == [[False, True, False, False], [False] * 4]
    with pytest.raises(ValueError, match="example 1 has a format_mask of 1 tokens, but input_ids of 2"):
        collate([good, {**good, "format_mask": [1]}])
    with pytest.raises(ValueError, match="example 0 has no format_mask"):
        collate([{"input_ids": [5], "labels": [5]}])


def test_a_template_that_leaves_the_end_of_turn_untrained_is_refused(build, tokenizer):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    kept, tokenizer.chat_template = tokenizer.chat_template, template
    plain = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
    try:
        with pytest.raises(ValueError, match="end-of-turn token"):
            build(dataset=Dataset.from_list([plain]))
    finally:
        tokenizer.chat_template = kept


def test_other_protocols_bring_their_own_spans(build):
    only_tags = partial(tool_call_format_spans, names=False, argument_keys=False)
    fewer = build(trainer={"format_spans": only_tags}).train_dataset
    more = build().train_dataset
    assert 0 < sum(sum(row["format_mask"]) for row in fewer) < sum(sum(row["format_mask"]) for row in more)
