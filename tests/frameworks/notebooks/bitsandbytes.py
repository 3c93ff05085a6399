"""Layers of bitsandbytes in 8 and 4 bits, on the CPU."""

# %%
import bitsandbytes as bnb
import torch
from torch import nn

# %%
exact = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 128))
x = torch.randn(8, 512)

# %%
four = nn.Sequential(
    bnb.nn.Linear4bit(512, 512, quant_type="nf4", compute_dtype=torch.float32),
    nn.ReLU(),
    bnb.nn.Linear4bit(512, 128, quant_type="nf4", compute_dtype=torch.float32),
)
print(four.load_state_dict(exact.state_dict()))
four = four.to("cpu")

# %%
with torch.no_grad():
    print((four(x) - exact(x)).abs().mean().item())

# %%
packed, state = bnb.functional.quantize_4bit(exact[0].weight.data, quant_type="nf4")
print(packed.shape, bnb.functional.dequantize_4bit(packed, state).sum().item())

# %%
blocks, state8 = bnb.functional.quantize_blockwise(exact[0].weight.data)
print(blocks.dtype, bnb.functional.dequantize_blockwise(blocks, state8).sum().item())

# %%
adapter = nn.Linear(512, 128)
optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-3)
for _ in range(3):
    loss = ((four(x) + adapter(x)) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())

# %%
torch.save(four.state_dict(), "four.pt")
saved = torch.load("four.pt")
print(sorted(saved)[:4])

# %%
with torch.no_grad():
    print(four(x).sum().item(), adapter(x).sum().item())
