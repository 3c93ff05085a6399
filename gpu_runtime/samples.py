"""Small real models for experiments, with random weights and a tokenizer. Nothing is downloaded.

    from gpu_runtime import samples
    samples.causal_lm("models/writer", size="48 MiB")
    samples.gguf_lm("models/writer.gguf")

Runbooks, drills and tests use these models. The models' output is nonsense, but always the same,
because the weights depend only on the seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .threads import import_whole
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
    """A byte-level BPE tokenizer with a chat template.

    The tokenizer has 312 entries, because its training text is short. The limit is VOCABULARY.
    """
    import_whole("tokenizers.trainers")
    import_whole("transformers", "PreTrainedTokenizerFast")
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
    """Saves a new Llama of 0.6 MB, or of about `size`, in `directory`. Returns this path.

    `shard="100KB"` splits the weights into files of 100 KB. If `tied` is true, input and output
    embeddings share their weights. `dtype` is the name of a torch dtype. `seed` determines the
    weights. `shape` overrides fields of the LlamaConfig. `generate` writes only printable
    characters, and never an end token. So a text has exactly as many tokens as were requested.
    """
    fields = {**_shape_for(size), "tie_word_embeddings": tied, **shape}
    return _save("LlamaForCausalLM", fields, directory, seed, dtype, shard)


def embedder(directory: str | Path, *, size: str | int | None = None, seed: int = 0) -> Path:
    """Saves a new embedding model, a Llama without a head, in `directory`. Returns this path.

    `size` and `seed` are as in `causal_lm`.
    """
    return _save("LlamaModel", _shape_for(size), directory, seed)


def reranker(directory: str | Path, *, size: str | int | None = None, seed: int = 0) -> Path:
    """Saves a new reranker, a Llama that scores a sequence, in `directory`. Returns this path.

    `size` and `seed` are as in `causal_lm`.
    """
    fields = {**_shape_for(size), "num_labels": 1}
    return _save("LlamaForSequenceClassification", fields, directory, seed)


def gguf_lm(
    file: str | Path, *, size: str | int | None = None, context: int = 512, seed: int = 0
) -> Path:
    """Saves a new Llama of 0.5 MB, or of about `size`, as GGUF in `file`. Returns this path.

    `context` is the model's longest context in tokens. `seed` determines the weights. The
    vocabulary is bytes and printable characters, and the model has a chat template. The model
    generates only printable characters and never an end token. So a text has exactly as many tokens
    as were requested.
    """
    import_whole("gguf")
    import gguf

    shape, words = {**_SHAPE, **_shape_for(size)}, _gguf_vocabulary()
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name(Path(file).stem)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _write_vocabulary(writer, words)
    _write_weights(writer, shape, words, seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(file)


def _gguf_vocabulary() -> list[tuple[str, int]]:
    """Every token with its type: control tokens, all bytes, and printable characters."""
    import_whole("gguf")
    import gguf

    kinds = gguf.TokenType
    words = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    # The vocabulary has all bytes, so that every text can be written in tokens.
    words += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    words.append(("\u2581", kinds.NORMAL))
    words += [(chr(code), kinds.NORMAL) for code in range(33, 127)]
    return words


def _write_vocabulary(writer: Any, words: list[tuple[str, int]]) -> None:
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


def _write_weights(
    writer: Any, shape: dict[str, int], words: list[tuple[str, int]], seed: int
) -> None:
    import_whole("gguf")
    import_whole("numpy")
    import gguf
    import numpy as np

    width, inner = shape["hidden_size"], shape["intermediate_size"]
    chance = np.random.default_rng(seed)

    def random(rows: int) -> Any:
        return chance.standard_normal((rows, width), np.float32) * 0.05

    key_width = width // shape["num_attention_heads"] * shape["num_key_value_heads"]
    rows_of = {
        "attn_q": width,
        "attn_k": key_width,
        "attn_v": key_width,
        "attn_output": width,
        "ffn_gate": inner,
        "ffn_up": inner,
    }
    writer.add_tensor("token_embd.weight", random(len(words)))
    for layer in range(shape["num_hidden_layers"]):
        for name, rows in rows_of.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", random(rows))
        writer.add_tensor(f"blk.{layer}.ffn_down.weight", random(inner).reshape(width, inner))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    scores = random(len(words))
    # Control tokens and single bytes would end or break the text. Never give them the top score.
    scores[[kind is not gguf.TokenType.NORMAL for _, kind in words]] = 0
    writer.add_tensor("output.weight", scores)


def _shape_for(size: str | int | None) -> dict[str, int]:
    """Config fields of a float32 Llama with weights of about `size`; empty if `size` is None."""
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


def _unprintable(words: Any) -> list[int]:
    """The tokens of the tokenizer `words` that are not printable ASCII text, such as the end token."""
    texts = [words.decode([id], skip_special_tokens=True).strip() for id in range(VOCABULARY)]
    return [
        id for id, text in enumerate(texts) if not (text and text.isascii() and text.isprintable())
    ]


def _save(
    kind: str,
    fields: dict[str, Any],
    directory: str | Path,
    seed: int,
    dtype: str = "float32",
    shard: str | None = None,
) -> Path:
    """Saves a new model of this class of transformers, with these `fields` of its LlamaConfig."""
    import_whole("torch")
    import_whole("transformers", "LlamaConfig", kind)
    import_whole("transformers.utils")
    import torch
    import transformers
    from transformers.utils import logging

    config = transformers.LlamaConfig(**{**_SHAPE, **fields})
    with torch.random.fork_rng(devices=()):  # the caller's random numbers do not change
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the cards too
        model = getattr(transformers, kind)(config).to(getattr(torch, dtype)).eval()
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
    finally:
        if had_bars:
            logging.enable_progress_bar()
    words = tokenizer()
    words.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.suppress_tokens = _unprintable(words)
        model.generation_config.save_pretrained(directory)
    return Path(directory)
