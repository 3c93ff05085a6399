"""Sentence embeddings: a small BERT with a tokenizer made here, trained by pairs."""

# %%
import torch
from sentence_transformers import InputExample, SentenceTransformer, losses, util
from sentence_transformers.models import Dense, Normalize, Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

# %%
words = "the a cat dog sits runs on in mat park red blue big small house tree".split()
special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
with open("vocab.txt", "w") as file:
    file.write("\n".join([*special, *words]))
tokenizer = BertTokenizerFast("vocab.txt")

# %%
size = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
BertModel(BertConfig(vocab_size=len(tokenizer), **size)).save_pretrained("bert")
tokenizer.save_pretrained("bert")

# %%
body = Transformer("bert", max_seq_length=16)
pooling = Pooling(128, "mean")
model = SentenceTransformer(modules=[body, pooling, Dense(128, 64), Normalize()], device="cpu")

# %%
sentences = [f"the {a} {b} on a {c}" for a in words[2:4] for b in words[4:6] for c in words[8:10]]
before = model.encode(sentences, show_progress_bar=False, convert_to_tensor=True)
print(before.shape, before.sum().item())

# %%
pairs = [InputExample(texts=[one, one.replace("the", "a")]) for one in sentences]
loader = torch.utils.data.DataLoader(
    pairs, 4, shuffle=True, collate_fn=model.smart_batching_collate
)
loss = losses.MultipleNegativesRankingLoss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# %%
model.train()
for features, labels in loader:
    value = loss(features, labels)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
print(value.item())

# %%
after = model.encode(sentences, show_progress_bar=False)
print(after.sum(), util.cos_sim(after[:2], after[2:4]))

# %%
model.save("saved")
again = SentenceTransformer("saved", device="cpu")
print((again.encode(sentences, show_progress_bar=False) == after).all())

# %%
print(util.semantic_search(after[:1], after, top_k=3))
