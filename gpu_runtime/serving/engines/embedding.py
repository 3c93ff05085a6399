"""Embeddings and scores of many texts by a transformers module, in batches.

Texts of similar length are computed together, since shorter texts are padded to the longest one of their batch. The
padding is masked, so a text has the same vector alone and among other texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import cannot

if TYPE_CHECKING:
    from ...backends.pytorch.sentence_modules import Recipe

TEXTS_AT_ONCE = 32
TOKENS_AT_ONCE = 16_384  # the padding counts too


def recipe_of(module: Any, tokenizer: Any, model: str) -> Recipe | None:
    """How `module` makes one vector of the vectors of a text's tokens. None is the mean.

    If the load of the `model` did not attach it, it is read from the files beside its `tokenizer`. Raises Refused.
    """
    found = getattr(module, "sentence_recipe", None)
    if found is not None:
        return found
    from ...backends.pytorch.sentence_modules import recipe_of as read

    directory = folder_of(tokenizer)
    try:
        recipe = read(directory, tokenizer)
    except ValueError as error:
        raise cannot(model, str(error), "model") from None
    if recipe is not None and next(recipe.parameters(), None) is not None:
        why = (
            f"sentence-transformers has saved weights in {directory} that were not loaded with it.\n"
            f"  Load them too:  rt.forget({model!r}), then  "
            f"rt.register({model!r}, {str(directory)!r}, model_type='embedding')"
        )
        raise cannot(model, why, "model")
    return recipe


def folder_of(tokenizer: Any) -> Path:
    """The folder from which the `tokenizer` was loaded."""
    return Path(str(getattr(tokenizer, "name_or_path", "")))


def most_tokens_of_pair(module: Any, tokenizer: Any, model: str) -> int | None:
    """The most tokens that the reranker `module` reads of a query and a document; None: no limit. Raises Refused."""
    from ...backends.pytorch.sentence_modules import most_tokens_of_pair as read

    try:
        limits = [most_tokens(module), read(folder_of(tokenizer), tokenizer)]
    except (OSError, ValueError) as error:
        why = f"its files for sentence-transformers cannot be used: {error}"
        raise cannot(model, why, "model") from None
    return min((limit for limit in limits if limit is not None), default=None)


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
    recipe: Recipe | None,
    cancelled: Callable[[], bool],
    has_prompt: bool = False,
) -> list[list[float]]:
    """An embedding of length one by `module` of each of the `texts`, which are lists of tokens.

    `has_prompt` is whether the texts begin with the prompt of the `recipe`. Once `cancelled()` is true, the texts that
    are left get empty vectors.
    """
    import torch

    rows: list[list[float]] = [[] for _ in texts]
    with torch.inference_mode():
        for batch in batches([len(text) for text in texts]):
            if cancelled():
                break
            ids, mask = (part.to(module.device) for part in padded([texts[at] for at in batch]))
            states = module(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            if recipe is None:
                weights = mask.unsqueeze(-1).to(states.dtype)
                vectors = (states * weights).sum(dim=1) / weights.sum(dim=1)
            else:
                vectors = recipe(states, mask, has_prompt)
            found = torch.nn.functional.normalize(vectors, dim=1).tolist()
            for index, vector in zip(batch, found, strict=True):
                rows[index] = vector
    return rows


def rank_in_batches(
    module: Any, pairs: list[Any], model: str, cancelled: Callable[[], bool]
) -> list[float]:
    """A score from 0 to 1, by the `module` of `model`, for each of the `pairs` of a query and a document, tokenised.

    Once `cancelled()` is true, the pairs that are left get the score 0. Raises Refused if the module gives more than
    two figures for a pair.
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
