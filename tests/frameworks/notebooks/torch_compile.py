"""torch.compile with the compiler of C++: forward, backward, other shapes, an exported program."""

# %%
import torch
from torch import nn

# %%
model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 16))
compiled = torch.compile(model)
x = torch.randn(32, 256)

# %%
with torch.no_grad():
    print(torch.allclose(compiled(x), model(x), atol=1e-5))

# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    loss = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())

# %%
print(compiled(torch.randn(48, 256)).sum().item())


# %%
@torch.compile(dynamic=True)
def scaled(x, y):
    return (x.softmax(-1) @ y).relu() * 2


print(scaled(x, torch.randn(256, 8)).sum().item())

# %%
frozen = torch.compile(model.eval(), options={"freezing": True})
with torch.no_grad():
    print(frozen(x).sum().item())

# %%
program = torch.export.export(model, (x,))
torch.export.save(program, "model.pt2")
print(torch.export.load("model.pt2").module()(x).sum().item())

# %%
with torch.no_grad():
    print(compiled(x).sum().item(), frozen(x).sum().item())
