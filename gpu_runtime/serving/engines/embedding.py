"""Embeddings of many texts by a transformers module, in batches.

Texts of similar length are computed together, since shorter texts are padded to the longest one of their batch. The
padding is masked, so a text has the same vector alone and among other texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TEXTS_AT_ONCE = 32
TOKENS_AT_ONCE = 16_384  # padding included
MEAN, FIRST, LAST = "mean", "first", "last"
_POOLING_FILE = Path("1_Pooling") / "config.json"  # as sentence-transformers saves it
_POOLING_KEYS = {"pooling_mode_cls_token": FIRST, "pooling_mode_lasttoken": LAST}


def pooling_of(source: str) -> str:
    """How the model at `source` makes one vector of the vectors of a text's tokens: MEAN, FIRST or LAST.

    The directory of a model of sentence-transformers says so. For any other model it is the mean.
    """
    try:
        found = json.loads((Path(source).expanduser() / _POOLING_FILE).read_text())
    except (OSError, ValueError):  # no such model, or not on this machine
        return MEAN
    modes = found if isinstance(found, dict) else {}
    return next((mode for key, mode in _POOLING_KEYS.items() if modes.get(key)), MEAN)


def batches(lengths: list[int]) -> Iterator[list[int]]:
    """Yields the indices of texts that are computed together; `lengths` are the texts' numbers of tokens.

    >>> list(batches([3, 9000, 2, 9000]))
    [[2, 0], [1], [3]]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        size = lengths[index]  # the longest so far
        is_longer = batch and size > 2 * lengths[batch[0]] and size > TEXTS_AT_ONCE
        is_full = len(batch) == TEXTS_AT_ONCE or (len(batch) + 1) * size > TOKENS_AT_ONCE
        if batch and (is_full or is_longer):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def embed_in_batches(
    module: Any, texts: list[list[int]], pooling: str, cancelled: Callable[[], bool]
) -> list[list[float]]:
    """An embedding by `module` of each of the `texts`, which are lists of tokens. Each vector has length one.

    `pooling` is a result of `pooling_of`. The computation ends early once `cancelled()` is true.
    """
    import torch

    rows: list[list[float]] = [[] for _ in texts]
    with torch.inference_mode():
        for batch in batches([len(text) for text in texts]):
            if cancelled():
                break
            ids, mask = _padded([texts[index] for index in batch])
            output = module(input_ids=ids.to(module.device), attention_mask=mask.to(module.device))
            vectors = _pooled(output.last_hidden_state.float(), mask.to(module.device), pooling)
            found = torch.nn.functional.normalize(vectors, dim=1).tolist()
            for index, vector in zip(batch, found, strict=True):
                rows[index] = vector
    return rows


def _padded(texts: list[list[int]]) -> tuple[Any, Any]:
    """The tokens of `texts` as one tensor, filled up with zeros, and the mask of the real tokens."""
    import torch

    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    return ids, (torch.arange(longest) < lengths[:, None]).long()


def _pooled(states: Any, mask: Any, pooling: str) -> Any:
    """One vector for each text, from the `states` of its tokens."""
    if pooling == FIRST:
        return states[:, 0]
    if pooling == LAST:
        rows = range(states.shape[0])
        return states[list(rows), mask.sum(dim=1) - 1]
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(dim=1) / weights.sum(dim=1)
