"""Reads what sentence-transformers has saved beside a transformers model: how vectors of tokens become one.

That library loads the modules. Their weights belong to the model: they are counted, and move and leave with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import files
from ...threads import import_whole, with_own_modes
from ..base import is_out_of_memory
from ..formats import safetensors

_WITH_WEIGHTS = ("Dense", "LayerNorm")
_MODULES = ("Pooling", "Normalize", "Dropout", *_WITH_WEIGHTS)  # after the transformers module
_LEGACY_POOLING = tuple(  # the names before sentence-transformers 6; each is true or false
    f"pooling_mode_{name}"
    for name in ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens")
    + ("weightedmean_tokens", "lasttoken")
)
# Fields of the first module, a transformers module, with the values that are implemented here.
_TRANSFORMER_FIELDS: dict[str, tuple[Any, ...]] = {
    "unpad_inputs": (None, False, True),  # a way to compute the same
    "processing_kwargs": (None, {}),
}
_OUTPUTS = {  # task of the first module -> the output that it reads, and the name that it gives to it
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
}
_SETTINGS_FILE = "config_sentence_transformers.json"
_LARGEST_LIMIT = 1_000_000  # tokenizers without a limit name a huge number


class Recipe(nn.Module):
    """How a model makes one vector of the vectors of a text's tokens, by modules of sentence-transformers."""

    def __init__(self, steps: list[nn.Module], limit: int | None, lower: bool) -> None:
        """`steps` are the modules after the transformers module; the first of them pools.

        `limit` is the most tokens of a text, if the files name it. With `lower`, texts are turned
        into lower case.
        """
        super().__init__()
        self.steps, self.limit, self.lower = nn.ModuleList(steps), limit, lower
        self.prompt = ""  # begins each text, unless the text is given as tokens
        self.skipped = 0  # tokens of the prompt that the pooling leaves out

    def forward(self, states: Tensor, mask: Tensor, has_prompt: bool) -> Tensor:
        """One vector for each text, [texts, width].

        `states` are the vectors of tokens, [texts, tokens, width] in float32; `mask` is 1 for each
        real token. `has_prompt` is whether the texts begin with the prompt.
        """
        features = {"token_embeddings": states, "attention_mask": mask}
        if self.skipped and has_prompt:
            features["prompt_length"] = self.skipped
        for step in self.steps:
            features = step(features)
        return features["sentence_embedding"]


@with_own_modes()
def recipe_of(directory: Path, tokenizer: Any) -> Recipe | None:
    """The recipe in the files of `directory`; None if sentence-transformers has saved none there.

    `tokenizer` is the tokenizer of the model. Raises ValueError for a part that is not implemented, unknown or damaged,
    and without that library. The text is the end of a sentence about the model.
    """
    if not (directory / safetensors.MODULES_FILE).is_file():
        return None
    try:
        return _read(directory, tokenizer)
    except ImportError:
        raise ValueError(
            "sentence-transformers, which made it, is not installed here.\n"
            "  Install it:  pip install 'sentence-transformers>=5.1'"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(f"its files for sentence-transformers cannot be used: {error}") from None


def _read(directory: Path, tokenizer: Any) -> Recipe:
    listed = safetensors.listed_modules(directory)
    kinds, limit, lower = _first(directory, tokenizer, listed, "feature-extraction")
    if kinds[:1] != ["Pooling"]:
        raise ValueError(f"its second module is {kinds[:1]}, not a Pooling")
    steps = [_step(directory, *row) for row in zip(kinds, listed[1:], strict=True)]
    recipe = Recipe(steps, limit, lower)
    _set_prompt(recipe, _config(directory / _SETTINGS_FILE), tokenizer)
    return recipe


def _first(
    directory: Path, tokenizer: Any, listed: list[dict[str, Any]], task: str
) -> tuple[list[str], int | None, bool]:
    """The kinds of the modules after the first one, the most tokens of a text, and whether it becomes lower case.

    The first module must be a transformers module for this `task`.
    """
    kinds = [str(row.get("type")).rpartition(".")[2] for row in listed]
    if kinds[:1] != ["Transformer"] or listed[0].get("path"):
        raise ValueError(f"its first module is {kinds[:1]}, not a Transformer in the folder itself")
    first = _config(directory / "sentence_bert_config.json")
    limits = [first.pop("max_seq_length", None), most_tokens(tokenizer)]
    limit = min((limit for limit in limits if limit is not None), default=None)
    lower = bool(first.pop("do_lower_case", False))
    modality = first.pop("modality_config", {})
    if "message" in modality:
        raise ValueError("it reads texts as messages of a chat, which is not implemented here")
    output, name = _OUTPUTS[task]
    found = modality.get("text", {}).get("method_output_name", output)
    if found != output:
        raise ValueError(f"the output {found} of its Transformer is not implemented here")
    fields = {**_TRANSFORMER_FIELDS, "transformer_task": (task,), "module_output_name": (name,)}
    for field, value in first.items():
        if value not in fields.get(field, (None,)):
            raise ValueError(f"{field}={value!r} of its Transformer is not implemented here")
    return kinds[1:], limit, lower


def most_tokens(tokenizer: Any) -> int | None:
    """The most tokens of a text that the `tokenizer` names; None if it names no limit."""
    limit = getattr(tokenizer, "model_max_length", None)
    return limit if isinstance(limit, int) and limit < _LARGEST_LIMIT else None


def most_tokens_of_pair(directory: Path, tokenizer: Any) -> int | None:
    """The most tokens of a query and a document that the reranker in `directory` reads, if known. Raises ValueError."""
    if not (directory / safetensors.MODULES_FILE).is_file():
        return most_tokens(tokenizer)
    listed = safetensors.listed_modules(directory)
    kinds, limit, lower = _first(directory, tokenizer, listed, "sequence-classification")
    prompt = _config(directory / _SETTINGS_FILE).get("default_prompt_name")
    for value, what in ((kinds, "module"), (lower, "do_lower_case"), (prompt, "default prompt")):
        if value:
            raise ValueError(f"its {what} {value!r} is not implemented here")
    return limit


def _config(file: Path) -> dict[str, Any]:
    return files.json_object(file) if file.is_file() else {}


def _step(directory: Path, kind: str, row: dict[str, Any]) -> nn.Module:
    """The module of sentence-transformers that `row` of modules.json names, loaded from `directory`.

    Raises ValueError for fields that the library does not know, and would leave out.
    """
    import_whole("sentence_transformers")
    import sentence_transformers

    try:
        from sentence_transformers.sentence_transformer import modules
    except ImportError:  # before version 6
        modules = sentence_transformers.models
    if kind not in _MODULES or not str(row["type"]).startswith("sentence_transformers."):
        raise ValueError(f"its module {row['type']} is not implemented here")
    path = row.get("path", "")
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
    has_weights = kind in _WITH_WEIGHTS
    if has_weights and not (directory / path / safetensors.WEIGHTS_FILE).is_file():
        raise ValueError(
            f"its {kind} has no {path}/{safetensors.WEIGHTS_FILE}, and pickled weights are not read"
        )
    with torch.random.fork_rng(devices=[]):  # a new layer draws random weights first
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
    if recipe.prompt and not recipe.steps[0].include_prompt:
        tokens = tokenizer(recipe.prompt)["input_ids"]
        ends = bool(tokens) and tokens[-1] in tokenizer.all_special_ids
        recipe.skipped = len(tokens) - ends
