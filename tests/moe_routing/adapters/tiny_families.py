"""A tiny model of every family of the installed transformers that records router logits."""

import importlib
import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# Set wherever a configuration has the attribute; sizes that divide each other and keep every special case small.
SIZES: dict[str, Any] = {
    "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 32, "d_model": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 4, "num_heads": 4, "n_heads": 4, "num_key_value_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "d_ff": 16, "d_kv": 4, "head_dim": 8, "intermediate_size": 16, "moe_intermediate_size": 8, "ffn_hidden_size": 16,
    "expert_ffn_hidden_size": 8, "shared_expert_intermediate_size": 8, "shared_intermediate_size": 8,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_top_k": 2, "top_k_experts": 2, "moe_k": 2, "n_group": 2, "topk_group": 1, "num_groups": 2,
    "num_expert_group": 2, "first_k_dense_replace": 0, "num_dense_layers": 0, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "expert_layer_period": 1, "expert_layer_offset": 0, "encoder_sparse_step": 1,
    "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "max_position_embeddings": 64, "sliding_window": 8,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_expand": 2, "mamba_num_heads": 4,
    "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
    "router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "use_mamba_kernels": False, "enable_moe_block": True,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip

# Where the common sizes do not fit.
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
SPECIAL: dict[str, dict[str, Any]] = {
    "beam": SPARSE,
    "deepseek_ocr2": SPARSE,
    "step3p7": SPARSE | {"num_nextn_predict_layers": 0},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v4": {"mlp_layer_types": ["moe", "moe"], "scoring_func": "sigmoid"},
    "doge": {"is_moe": True, "num_experts": 16},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [8, 8], "rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
    "glm4v_moe": {"rope_parameters": ROPE | {"mrope_section": [0, 1, 1], "partial_rotary_factor": 0.5}},
    "glm5_next": SPARSE | {"index_kpool": 2, "qk_rope_head_dim": 0},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["attention", "mamba"]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "zaya": {"num_experts_per_tok": 1},
}

# Families whose code casts to float32 somewhere.
FLOAT32 = {"inkling2"}


def model_class(family: str) -> type[PreTrainedModel]:
    """The bare text model of a family: the class that records router logits and has the fewest parts around it."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    found = [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, PreTrainedModel)
        and cls.__module__ == module.__name__
        and "router_logits" in (cls._can_record_outputs or {})
        and not cls.__name__.endswith("PreTrainedModel")
    ]
    ranks = ("TextModel", "Model", "TextForCausalLM", "ForCausalLM")
    rank = {cls: next((i for i, end in enumerate(ranks) if cls.__name__.endswith(end)), 9) for cls in found}
    return min(found, key=lambda cls: (rank[cls], len(cls.__name__)))


def tiny_config(family: str, cls: type[PreTrainedModel]) -> Any:
    """A configuration of a few thousand parameters."""
    known = inspect.signature(cls.config_class).parameters
    special = SPECIAL.get(family, {})
    sizes = {key: value for key, value in (SIZES | special).items() if key in known or key in special}
    config = cls.config_class(**sizes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def tiny_model(family: str) -> nn.Module:
    """A random model, in float64 where the family's code allows it, without dropout."""
    cls = model_class(family)
    torch.manual_seed(0)
    model = cls(tiny_config(family, cls))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return (model.float() if family in FLOAT32 else model.double()).eval()
