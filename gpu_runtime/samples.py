"""Small real models to try things with: random weights, a tokenizer trained on the spot, no download.

    from gpu_runtime import samples
    samples.causal_lm("models/writer", size="48 MiB")
    samples.gguf_lm("models/writer.gguf")

They answer nonsense, always the same nonsense: the weights come from the seed. For runbooks, drills and tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .units import parse_bytes

VOCABULARY = 512
_SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def tokenizer() -> Any:
    """A byte-level BPE tokenizer of 512 entries with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog. GPU memory console operator " * 20], trainer
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    made.chat_template = (
        "{% for m in messages %}{{ '<s>' + m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return made


def causal_lm(
    directory: str | Path,
    *,
    size: str | int | None = None,
    tied: bool = False,
    dtype: str = "float32",
    shard: str | None = None,
    seed: int = 0,
    **shape: int,
) -> Path:
    """The directory of a new Llama, 0.6 MB or about `size`; `shard="100KB"` splits it into files of that size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**_SHAPE, **_grown(size), "tie_word_embeddings": tied, **shape})
    return _save(LlamaForCausalLM, config, directory, dtype, shard, seed)


def embedder(directory: str | Path, *, size: str | int | None = None, seed: int = 0) -> Path:
    """The directory of a new Llama without a head, as embedding models are saved."""
    from transformers import LlamaConfig, LlamaModel

    return _save(
        LlamaModel, LlamaConfig(**{**_SHAPE, **_grown(size)}), directory, "float32", None, seed
    )


def reranker(directory: str | Path, *, size: str | int | None = None, seed: int = 0) -> Path:
    """The directory of a new Llama with one score for a sequence."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(**{**_SHAPE, **_grown(size)}, num_labels=1)
    return _save(LlamaForSequenceClassification, config, directory, "float32", None, seed)


def gguf_lm(
    file: str | Path, *, size: str | int | None = None, context: int = 512, seed: int = 0
) -> Path:
    """The file of a new Llama in GGUF, 0.5 MB or about `size`, with a vocabulary of bytes and signs and a chat
    template.

    It writes nothing but printable signs, and no end: so a text has just as many tokens as were asked for.
    """
    import gguf
    import numpy as np

    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **_grown(size),
    }
    width, inner, heads = (
        shape["hidden_size"],
        shape["intermediate_size"],
        shape["num_attention_heads"],
    )
    kinds, normal = gguf.TokenType, [chr(code) for code in range(33, 127)]
    words = [
        ("<unk>", kinds.UNKNOWN),
        ("<s>", kinds.CONTROL),
        ("</s>", kinds.CONTROL),
        *(
            (f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)
        ),  # so that every text can be told in tokens
        ("\u2581", kinds.NORMAL),
        *((sign, kinds.NORMAL) for sign in normal),
    ]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name(Path(file).stem)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([word.encode() for word, _ in words])
    writer.add_token_scores([-float(place) for place in range(len(words))])
    writer.add_token_types([kind for _, kind in words])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template(
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    chance = np.random.default_rng(seed)

    def random(rows: int) -> Any:
        return chance.standard_normal((rows, width), np.float32) * 0.05

    kv = width // heads * shape["num_key_value_heads"]
    writer.add_tensor("token_embd.weight", random(len(words)))
    for layer in range(shape["num_hidden_layers"]):
        for name, rows in (
            ("attn_q", width),
            ("attn_k", kv),
            ("attn_v", kv),
            ("attn_output", width),
            ("ffn_gate", inner),
            ("ffn_up", inner),
        ):
            writer.add_tensor(f"blk.{layer}.{name}.weight", random(rows))
        writer.add_tensor(f"blk.{layer}.ffn_down.weight", random(inner).reshape(width, inner))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    scores = random(len(words))
    scores[[kind is not kinds.NORMAL for _, kind in words]] = (
        0  # never the likeliest: no control sign, no half a letter
    )
    writer.add_tensor("output.weight", scores)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(file)


def _grown(size: str | int | None) -> dict[str, int]:
    """The shape of a float32 Llama whose weights are about that large; nothing changes where no size is given."""
    if size is None:
        return {}
    hidden, inner, kv = 512, 1408, 512 // 2
    layer = 4 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    layers = max(1, round((parse_bytes(size) - 8 * VOCABULARY * hidden) / layer))
    return dict(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )


def _save(
    kind: Any, config: Any, directory: str | Path, dtype: str, shard: str | None, seed: int
) -> Path:
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
