"""Embeddings and scores of many texts by a transformers module, in batches.

Texts of similar length are computed together, since shorter texts are padded to the longest one of their batch. The
padding is masked, so a text has the same vector alone and among other texts.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import forks, limited_files
from .base import cannot

TEXTS_AT_ONCE = 32
TOKENS_AT_ONCE = 16_384  # the padding counts too
MODULES_FILE = "modules.json"  # in a model that sentence-transformers has saved
_MODULES = (
    "Pooling",
    "Dense",
    "Normalize",
    "LayerNorm",
    "Dropout",
)  # after the transformers module
_LEGACY_POOLING = tuple(  # the names before sentence-transformers 6; each is true or false
    f"pooling_mode_{name}"
    for name in ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens")
    + ("weightedmean_tokens", "lasttoken")
)
# Fields of the first module, a transformers module, with the values that are implemented here.
_TRANSFORMER_FIELDS: dict[str, tuple[Any, ...]] = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "unpad_inputs": (None, False, True),  # a way to compute the same
    "processing_kwargs": (None, {}),
}
_LARGEST_LIMIT = 1_000_000  # tokenizers without a limit name a huge number
_recipes: weakref.WeakKeyDictionary[Any, Recipe] = weakref.WeakKeyDictionary()
_reading = forks.freed(threading.Lock())


@dataclass
class Recipe:
    """How a model makes one vector of the vectors of a text's tokens."""

    limit: int | None = None  # the most tokens of a text, if the model's files name a number
    prompt: str = ""  # begins each text, unless the text is given as tokens
    lower: bool = False  # whether texts are turned into lower case
    # Modules of sentence-transformers. Without any, the vector is the mean.
    modules: list[Any] = field(default_factory=list)
    skipped: int = 0  # tokens of the prompt that the pooling leaves out

    def vectors(self, states: Any, mask: Any, has_prompt: bool) -> Any:
        """One vector for each text, from the `states` of its tokens. `mask` is the mask that `padded` returned.

        `has_prompt` is whether the texts begin with the prompt. The pooling runs on the device of `states`, and what
        follows on the CPU, because the weights of later modules are small and belong to no lease.
        """
        if not self.modules:
            weights = mask.unsqueeze(-1).to(states.dtype)
            return (states * weights).sum(dim=1) / weights.sum(dim=1)
        features = {"token_embeddings": states, "attention_mask": mask}
        if self.skipped and has_prompt:
            features["prompt_length"] = self.skipped
        pooling, *rest = self.modules
        features = {"sentence_embedding": pooling(features)["sentence_embedding"].cpu()}
        for module in rest:
            features = module(features)
        return features["sentence_embedding"]


def recipe_of(module: Any, tokenizer: Any, model: str) -> Recipe:
    """The recipe of `module`, from the files beside its `tokenizer`. It is read once.

    A folder with the file modules.json was saved by sentence-transformers, and its modules are loaded by this library.
    Any other model gives the mean, as in that library. Raises Refused, which names the `model` and the part of its
    files that cannot be used.
    """
    with _reading:
        if module not in _recipes:
            directory = Path(str(getattr(tokenizer, "name_or_path", "")))
            has_modules = (directory / MODULES_FILE).is_file()
            try:
                found = _read(directory, tokenizer) if has_modules else Recipe()
            except ImportError:
                why = (
                    "sentence-transformers, which made it, is not installed here.\n"
                    "  Install it:  pip install 'sentence-transformers>=5.1'"
                )
                raise cannot(model, why, "model") from None
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                RecursionError,
            ) as error:
                why = f"its files for sentence-transformers cannot be used: {error}"
                raise cannot(model, why, "model") from None
            _recipes[module] = found
        return _recipes[module]


def _read(directory: Path, tokenizer: Any) -> Recipe:
    """The recipe in the files of `directory`. Raises ValueError for a part that is not implemented, or is unknown."""
    listed = json.loads(limited_files.read(directory / MODULES_FILE))
    if not isinstance(listed, list) or not all(isinstance(row, dict) for row in listed):
        raise ValueError(f"{MODULES_FILE} is no list of modules")
    kinds = [str(row.get("type")).rpartition(".")[2] for row in listed]
    first = _config(directory / "sentence_bert_config.json")
    if kinds[:1] != ["Transformer"] or listed[0].get("path"):
        raise ValueError(f"its first module is {kinds[:1]}, not a Transformer in the folder itself")
    if kinds[1:2] != ["Pooling"]:
        raise ValueError(f"its second module is {kinds[1:2]}, not a Pooling")
    limits = [first.pop("max_seq_length", None), getattr(tokenizer, "model_max_length", None)]
    known = [limit for limit in limits if isinstance(limit, int) and limit < _LARGEST_LIMIT]
    recipe = Recipe(min(known, default=None), lower=bool(first.pop("do_lower_case", False)))
    modality = first.pop("modality_config", {})
    if "message" in modality:
        raise ValueError("it reads texts as messages of a chat, which is not implemented here")
    output = modality.get("text", {}).get("method_output_name", "last_hidden_state")
    if output != "last_hidden_state":
        raise ValueError(f"the output {output} of its Transformer is not implemented here")
    for name, value in first.items():
        if value not in _TRANSFORMER_FIELDS.get(name, (None,)):
            raise ValueError(f"{name}={value!r} of its Transformer is not implemented here")
    for kind, row in zip(kinds[1:], listed[1:], strict=True):
        recipe.modules.append(_module(directory, kind, row))
    _set_prompt(recipe, _config(directory / "config_sentence_transformers.json"), tokenizer)
    return recipe


def _config(file: Path) -> dict[str, Any]:
    return limited_files.json_object(file) if file.is_file() else {}


def _module(directory: Path, kind: str, row: dict[str, Any]) -> Any:
    """The module of sentence-transformers that `row` of modules.json names, loaded from `directory`.

    The library leaves out fields that it does not know, and then uses their defaults. Here they are a ValueError.
    """
    import sentence_transformers

    try:
        from sentence_transformers.sentence_transformer import modules
    except ImportError:  # before version 6
        modules = sentence_transformers.models
    if kind not in _MODULES or not str(row["type"]).startswith("sentence_transformers."):
        raise ValueError(f"its module {row['type']} is not implemented here")
    path = str(row.get("path", ""))
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError(f"the path {path} of its module {kind} leaves its folder")
    config = _config(directory / path / "config.json")
    loaded = getattr(modules, kind)
    legacy = _LEGACY_POOLING if kind == "Pooling" else ()
    known = {*loaded.config_keys, *getattr(loaded, "config_key_renames", ()), *legacy}
    unknown = [name for name, value in config.items() if name not in known and value]
    if unknown:
        raise ValueError(f"its {kind} has fields that this version does not know: {unknown}")
    if kind == "Pooling" and not any(config.get(name) for name in ("pooling_mode", *legacy)):
        raise ValueError("its Pooling names no way to pool")
    activation = str(config.get("activation_function") or "torch.")
    if not activation.startswith("torch."):  # the library would use another one instead
        raise ValueError(f"activation_function={activation} of its Dense is no part of torch")
    made = loaded.load(str(directory), subfolder=path, local_files_only=True)
    return made.float().eval()


def _set_prompt(recipe: Recipe, config: dict[str, Any], tokenizer: Any) -> None:
    """Sets the prompt that the model's `config` names as the default one."""
    name = config.get("default_prompt_name")
    if name is None:
        return
    prompts = config.get("prompts") or {}
    if name not in prompts:
        raise ValueError(f"default_prompt_name={name!r} is not among its prompts")
    recipe.prompt = prompts[name]
    if recipe.prompt and not recipe.modules[0].include_prompt:
        tokens = tokenizer(recipe.prompt)["input_ids"]
        ends = bool(tokens) and tokens[-1] in tokenizer.all_special_ids
        recipe.skipped = len(tokens) - ends


def most_tokens(module: Any) -> int | None:
    """The largest number of tokens that `module` reads of one text; None if its config names no limit.

    RoBERTa, XLM-R and MPNet number positions from the row after the padding token's row. So of their 514 positions
    only 512 are for a text. A longer text is an index error, and on a real card it ends the CUDA context.
    """
    positions = getattr(module.config, "max_position_embeddings", None)
    if positions is None:
        return None
    for name, part in module.named_modules():
        if name.rpartition(".")[2] == "position_embeddings":
            padding = getattr(part, "padding_idx", None)
            return positions if padding is None else positions - padding - 1
    return positions


def batches(lengths: list[int]) -> Iterator[list[int]]:
    """Yields the indices of texts that are computed together; `lengths` are the texts' numbers of tokens.

    >>> list(batches([3, 9000, 2, 9000]))
    [[2, 0], [1], [3]]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        size = lengths[index]  # the lengths ascend, so this text is the longest of its batch
        is_longer = batch and size > 2 * lengths[batch[0]] and size > TEXTS_AT_ONCE
        is_full = len(batch) == TEXTS_AT_ONCE or (len(batch) + 1) * size > TOKENS_AT_ONCE
        if batch and (is_full or is_longer):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def embed_in_batches(
    module: Any,
    texts: list[list[int]],
    recipe: Recipe,
    cancelled: Callable[[], bool],
    has_prompt: bool = False,
) -> list[list[float]]:
    """An embedding by `module` of each of the `texts`, which are lists of tokens. Each vector has length one.

    `has_prompt` is whether the texts begin with the prompt of the `recipe`. Once `cancelled()` is true, no further
    batch is computed; the texts that are left have empty vectors.
    """
    import torch

    rows: list[list[float]] = [[] for _ in texts]
    with torch.inference_mode():
        for batch in batches([len(text) for text in texts]):
            if cancelled():
                break
            ids, mask = (part.to(module.device) for part in padded([texts[at] for at in batch]))
            states = module(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            vectors = recipe.vectors(states, mask, has_prompt)
            found = torch.nn.functional.normalize(vectors, dim=1).tolist()
            for index, vector in zip(batch, found, strict=True):
                rows[index] = vector
    return rows


def rank_in_batches(
    module: Any, pairs: list[Any], model: str, cancelled: Callable[[], bool]
) -> list[float]:
    """A score from 0 to 1 for each of the `pairs`, computed by the `module` of `model`.

    A pair is the tokenizer's output for a query and a document. Once `cancelled()` is true, no further batch is
    computed; the pairs that are left have the score 0. Raises Refused if the module gives more than two figures for a
    pair.
    """
    import torch

    scores = [0.0] * len(pairs)
    with torch.inference_mode():
        for batch in batches([len(pair["input_ids"]) for pair in pairs]):
            if cancelled():
                break
            ids, mask = padded([pairs[index]["input_ids"] for index in batch])
            inputs = {"input_ids": ids, "attention_mask": mask}
            if "token_type_ids" in pairs[0]:
                inputs["token_type_ids"], _ = padded(
                    [pairs[index]["token_type_ids"] for index in batch]
                )
            on_device = {name: tensor.to(module.device) for name, tensor in inputs.items()}
            logits = module(**on_device).logits.float()
            if logits.shape[1] > 2:
                why = f"it sorts texts into {logits.shape[1]} classes, and gives no score"
                raise cannot(model, why, "model")
            found = logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0.0)
            for index, score in zip(batch, found.sigmoid().tolist(), strict=True):
                scores[index] = score
    return scores


def padded(texts: list[list[int]]) -> tuple[Any, Any]:
    """The tokens of `texts` as one tensor, filled up with zeros, and the mask of the real tokens."""
    import torch

    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    return ids, (torch.arange(longest) < lengths[:, None]).long()
