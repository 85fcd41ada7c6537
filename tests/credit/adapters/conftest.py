"""A tiny Qwen3 with a tokenizer of its own, and rollouts fixed in advance, for the trainers."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig

from tests.credit.adapters.scripted import CALL, TEMPLATES

ROOT = Path(__file__).parents[3]
# verl installs a package `tests`, which would win over this folder; under pytest the folder wins.
START = """
import runpy, sys, types
sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests"].__path__ = ["tests"]
runpy.run_module("tests.credit.adapters.two_ranks", run_name="__main__", alter_sys=True)
"""
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


@pytest.fixture(scope="session")
def two(model_path, tmp_path_factory):
    """What each of two ranks saw, in the credit runs and in the routing run: starting them costs more than those do."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", START, str(model_path), str(folder)],
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error[-2000:] for error in errors)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
