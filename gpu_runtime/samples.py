"""Small real models to try things with: random weights, a tokenizer trained on the spot, no download.

    from gpu_runtime import samples
    samples.causal_lm("models/writer", size="48 MiB")

They answer nonsense, always the same nonsense: the weights come from the seed. For runbooks, drills and tests.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

from .units import parse_bytes

VOCABULARY = 512
_SHAPE = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def tokenizer() -> Any:
    """A byte-level BPE tokenizer of 512 entries with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator(["the quick brown fox jumps over the lazy dog. GPU memory console operator " * 20], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    made.chat_template = ("{% for m in messages %}{{ '<s>' + m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
                          "{% if add_generation_prompt %}assistant: {% endif %}")
    return made


def causal_lm(directory: str | Path, *, size: str | int | None = None, tied: bool = False, dtype: str = "float32",
              shard: str | None = None, seed: int = 0, **shape: int) -> Path:
    """The directory of a new Llama, 0.6 MB or about `size`; `shard="100KB"` splits it into files of that size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**_SHAPE, **_grown(size), "tie_word_embeddings": tied, **shape})
    return _save(LlamaForCausalLM, config, directory, dtype, shard, seed)


def embedder(directory: str | Path, *, size: str | int | None = None, seed: int = 0) -> Path:
    """The directory of a new Llama without a head, as embedding models are saved."""
    from transformers import LlamaConfig, LlamaModel

    return _save(LlamaModel, LlamaConfig(**{**_SHAPE, **_grown(size)}), directory, "float32", None, seed)


def reranker(directory: str | Path, *, size: str | int | None = None, seed: int = 0) -> Path:
    """The directory of a new Llama with one score for a sequence."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(**{**_SHAPE, **_grown(size)}, num_labels=1)
    return _save(LlamaForSequenceClassification, config, directory, "float32", None, seed)


def _grown(size: str | int | None) -> dict[str, int]:
    """The shape of a float32 Llama whose weights are about that large; nothing changes where no size is given."""
    if size is None:
        return {}
    hidden, inner, kv = 512, 1408, 512 // 2
    layer = 4 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    layers = max(1, round((parse_bytes(size) - 8 * VOCABULARY * hidden) / layer))
    return dict(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=8,
                num_key_value_heads=4)


def _save(kind: Any, config: Any, directory: str | Path, dtype: str, shard: str | None, seed: int) -> Path:
    import torch
    from transformers.utils import logging

    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = kind(config).to(getattr(torch, dtype)).eval()
    torch.random.set_rng_state(state)
    logging.disable_progress_bar()
    model.save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
    tokenizer().save_pretrained(directory)
    return Path(directory)
