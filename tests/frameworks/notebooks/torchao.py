"""Quantized weights of torchao, and training with optimizers of 8 bits."""

# %%
import copy

import torch
from torch import nn
from torchao.optim import AdamW8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_

# %%
model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 256)).eval()
x = torch.randn(16, 512)
exact = model(x)

# %%
small = copy.deepcopy(model)
quantize_(small, Int8WeightOnlyConfig())
print(type(small[0].weight).__name__)

# %%
with torch.no_grad():
    print((small(x) - exact).abs().max().item())

# %%
torch.save(small.state_dict(), "small.pt")
again = copy.deepcopy(small)
print(again.load_state_dict(torch.load("small.pt", weights_only=False), assign=True))

# %%
with torch.no_grad():
    print(torch.equal(again(x), small(x)))

# %%
optimizer = AdamW8bit(model.parameters(), lr=1e-3)
for _ in range(3):
    loss = (model(x) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())

# %%
print(sorted({type(one).__name__ for state in optimizer.state.values() for one in state.values()}))

# %%
for _ in range(2):
    (model(x) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(model[0].weight.sum().item())
