"""Small real models on disk: random weights, a tokenizer trained on the spot, a few hundred kilobytes each."""
from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

VOCABULARY = 512
_SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def tokenizer():
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


def causal_lm(directory: Path, *, tied: bool = False, dtype: str = "float32", shard: str | None = None,
              seed: int = 0, **sizes: int) -> Path:
    """A Llama of about 0.6 MB with a tokenizer; `shard="100KB"` splits it into files of that size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(LlamaForCausalLM, LlamaConfig(**{**_SIZES, "tie_word_embeddings": tied, **sizes}), directory, dtype, shard, seed)


def embedder(directory: Path, *, seed: int = 0) -> Path:
    """A Llama without a head, as embedding models are saved."""
    from transformers import LlamaConfig, LlamaModel

    return _save(LlamaModel, LlamaConfig(**_SIZES), directory, "float32", None, seed)


def reranker(directory: Path, *, seed: int = 0) -> Path:
    """A Llama with one score for a sequence."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return _save(LlamaForSequenceClassification, LlamaConfig(**_SIZES, num_labels=1), directory, "float32", None, seed)


def _save(kind, config, directory: Path, dtype: str, shard: str | None, seed: int) -> Path:
    import torch
    from transformers.utils import logging

    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = kind(config).to(getattr(torch, dtype)).eval()
    torch.random.set_rng_state(state)
    logging.disable_progress_bar()
    model.save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
    tokenizer().save_pretrained(directory)
    return directory


def hub_cache(home: Path, repository: str, directory: Path) -> None:
    """Puts the model where a download of `org/name` would have left it, under that HF_HUB_CACHE."""
    import shutil

    folder = home / ("models--" + repository.replace("/", "--"))
    commit = "0" * 40
    shutil.copytree(directory, folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)


def truncate(path: Path, by: int = 1) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - by)


def pickled(directory: Path) -> Path:
    """A directory whose weights are a pickle."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return directory
