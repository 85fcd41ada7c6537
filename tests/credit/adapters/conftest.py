"""A tiny Qwen3 with a tokenizer of its own, and rollouts fixed in advance, for the trainers."""

import json

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig

from tests.credit.adapters.scripted import CALL, TEMPLATES

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level BPE of a few hundred tokens with Qwen3's chat template as TRL ships it."""
    template = (TEMPLATES / "qwen3.jinja").read_text()
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = [template, CALL, "What is the weather in Oslo? It is sunny in Oslo."]
    core.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    fast.add_tokens(TAGS)
    fast.chat_template = template
    return fast


@pytest.fixture(scope="session")
def model_path(tmp_path_factory, tokenizer):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    path = tmp_path_factory.mktemp("tiny")
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def model(model_path):
    return Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32)


@pytest.fixture
def dataset():
    """Eight questions, half of which need a tool."""
    schema = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"Weather {i}?"}],
                "needs_tool": i % 2 == 0,
                "tools": json.dumps([schema] if i % 2 == 0 else []),
                "index": i,
            }
            for i in range(8)
        ]
    )


@pytest.fixture
def config(tmp_path):
    """Arguments of a short CPU run; keyword arguments override them."""

    def make(**changes):
        settings = {
            "output_dir": str(tmp_path / "run"),
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": 1,
            "max_steps": 1,
            "learning_rate": 0.1,
            "optim": "sgd",
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 48,
            "gradient_checkpointing": False,
            "shuffle_dataset": False,
            "seed": 3,
        }
        return GRPOConfig(**(settings | changes))

    return make
