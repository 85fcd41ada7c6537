"""A tokenizer and a model small enough to train in minutes, with the chat template and the layers of the real ones."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Text to every decoder, as in Qwen3's own tokenizer: scoring must still see the tags after special tokens are skipped.
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def build_tokenizer(
    texts: Iterable[str], values: Sequence[str] = (), vocab_size: int = 1536, max_token: int = 64
) -> Any:
    """A byte-level BPE tokenizer whose merges may cross words, with Qwen3's chat template as TRL ships it.

    Args:
        texts: rendered conversations to learn merges from.
        values: words that are always tokens of their own, as is every digit: an argument is then the same token in
            the question and in the call, and can be copied.
        vocab_size: most tokens in all.
        max_token: most characters a merge may hold; without a bound the constant list of schemas ends up as one token.

    Returns:
        A `PreTrainedTokenizerFast` with left padding and TRL's response template.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from trl.chat_template_utils import add_response_schema, qwen3_instruct_2507_chat_template

    tokenizer = Tokenizer(models.BPE())
    # Role headers too: a prompt ends after one, and a merge across it would give training other ids than generation.
    words = [rf"\b(?:{'|'.join(map(re.escape, values))})\b"] if values else []
    apart = Regex("|".join([*words, "[0-9]", r"(?:system|user|assistant)\n"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(apart, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=max_token,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(texts), trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[2], padding_side="left"
    )
    fast.chat_template = qwen3_instruct_2507_chat_template
    return add_response_schema(fast)


def render(conversations: Sequence[list[dict[str, Any]]], tools: list[dict[str, Any]] | None = None) -> list[str]:
    """Conversations as text, in the template of `build_tokenizer`."""
    from transformers.utils.chat_template_utils import render_jinja_template
    from trl.chat_template_utils import qwen3_instruct_2507_chat_template

    texts, _ = render_jinja_template(list(conversations), tools=tools, chat_template=qwen3_instruct_2507_chat_template)
    return list(texts)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Texts cut at special tokens and tags: merges across them would be learned, and never used."""
    cut = re.compile("|".join(map(re.escape, SPECIAL + TAGS)))
    for text in texts:
        yield from filter(None, cut.split(text))


def build_model(tokenizer: Any, *, hidden: int = 128, layers: int = 2, experts: int = 8, seed: int = 0) -> Any:
    """A randomly initialised `Qwen3MoeForCausalLM` of one to three million parameters.

    Args:
        tokenizer: gives the vocabulary and the end-of-turn token.
        hidden: width; also each expert's.
        layers: decoder layers, every one a mixture of `experts` experts of which two are used.
        experts: experts a layer.
        seed: seed of the initialisation.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden // 4,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        experts_implementation="grouped_mm",
    )
    return Qwen3MoeForCausalLM(config)
