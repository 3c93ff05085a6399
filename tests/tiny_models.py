"""The small models of `gpu_runtime.samples`, and helpers that damage or rearrange their files."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from gpu_runtime.samples import (
    _SHAPE,
    VOCABULARY,
    _gguf_vocabulary,
    _unprintable,
    causal_lm,
    embedder,
    gguf_lm,
    reranker,
    tokenizer,
)

__all__ = ["VOCABULARY", "causal_lm", "embedder", "gguf_lm", "reranker", "tokenizer"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


PARTS = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}\n{% endfor %}assistant: "
)


def sentence_embedder(
    directory: Path, *modules: Any, source: Path | None = None, template: bool = False, **more: Any
) -> Any:
    """Saves an embedder with these `modules` of sentence-transformers in `directory`. Returns that library's model.

    `source` is the folder of its transformers model, or None for a new one. Its chat template is left out, unless
    `template` is true: with one, the library reads texts as messages.
    """
    import sentence_transformers
    from sentence_transformers.sentence_transformer.modules import Transformer

    plain = directory.with_name(f"{directory.name}-plain")
    without = shutil.ignore_patterns(*() if template else ("chat_template.jinja",))
    source = source or embedder(directory.with_name(f"{directory.name}-source"))
    shutil.copytree(source, plain, ignore=without)
    first = Transformer(str(plain), max_seq_length=32)
    made = sentence_transformers.SentenceTransformer(
        modules=[first, *modules], device="cpu", **more
    )
    made.save(str(directory))
    return made


def vision_lm(directory: Path) -> Path:
    """Saves a new Llava in `directory`, a model that reads texts and images. Returns this path."""
    import torch
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = {"hidden_size": 32, "intermediate_size": 64, "image_size": 28, "patch_size": 14}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            num_hidden_layers=2, num_attention_heads=2, **sizes
        ),
        text_config=transformers.LlamaConfig(**{**_SHAPE, "vocab_size": len(words)}),
        image_token_index=words.convert_tokens_to_ids("<image>"),
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    torch.random.set_rng_state(state)
    model.generation_config.suppress_tokens = [*_unprintable(words), config.image_token_index]
    processor = transformers.LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        words,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=PARTS,
        num_additional_image_tokens=1,
    )
    for saved in (model, processor):
        saved.save_pretrained(directory)
    return directory


LONG_TOKENS = ["-" * 64, "\n" + " " * 40, "é" * 20, "a" * 600]  # of more than 32 bytes


def gguf_vocabulary(file: Path, kind: str) -> Path:
    """Saves a GGUF file of a vocabulary with LONG_TOKENS, without weights. Returns this path.

    `kind` is "spm" for SentencePiece, "added" for SentencePiece with these tokens added by the user, or "bpe" for
    bytes.
    """
    import gguf

    kinds = gguf.TokenType
    writer = gguf.GGUFWriter(str(file), "llama")
    shape = {
        "context_length": 256,
        "embedding_length": 64,
        "block_count": 1,
        "feed_forward_length": 64,
    }
    shape |= {"head_count": 4, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 16}
    for key, value in {**shape, "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}.items():
        getattr(writer, f"add_{key}")(value)
    if kind == "bpe":
        words = tokenizer()
        words.add_tokens(LONG_TOKENS)
        size = len(words)
        names = words.convert_ids_to_tokens(range(size))
        types = [kinds.CONTROL if at < 3 else kinds.NORMAL for at in range(size)]
        types[-len(LONG_TOKENS) :] = [kinds.USER_DEFINED] * len(LONG_TOKENS)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        merges = json.loads(words.backend_tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(pair) for pair in merges])
    else:
        added = kinds.USER_DEFINED if kind == "added" else kinds.NORMAL
        space = " " if kind == "added" else "\u2581"
        pairs = _gguf_vocabulary() + [(word.replace(" ", space), added) for word in LONG_TOKENS]
        names, types = [word for word, _ in pairs], [type for _, type in pairs]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(place) for place in range(len(names))])
    writer.add_vocab_size(len(names))
    writer.add_token_list([name.encode() for name in names])
    writer.add_token_types(types)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def hub_cache(home: Path, repository: str, directory: Path) -> None:
    """Copies the model to the place where a download of `repository` would put it, with `home` as HF_HUB_CACHE."""
    folder = home / ("models--" + repository.replace("/", "--"))
    commit = "0" * 40
    shutil.copytree(directory, folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)


def truncate(path: Path, by: int = 1) -> None:
    """Cuts the last `by` bytes off a file."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - by)


def pickled(directory: Path) -> Path:
    """A copy of a model directory whose weights are a pickle file."""
    directory.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return directory
