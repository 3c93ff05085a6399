"""A TensorBoard writer that stays open over all cells."""

# %%
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

# %%
writer = SummaryWriter("runs", flush_secs=1)

# %%
model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 10))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
x, y = torch.randn(64, 256), torch.randint(10, (64,))

# %%
for step in range(4):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    writer.add_scalar("loss", loss, step)
print(loss.item())

# %%
for name, value in model.named_parameters():
    writer.add_histogram(name, value, 0)

# %%
writer.add_graph(model, x)

# %%
writer.add_embedding(model(x).detach(), metadata=y.tolist())

# %%
writer.add_hparams({"lr": 1e-3}, {"loss": loss.item()}, run_name="one")
writer.flush()

# %%
for step in range(4, 8):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    writer.add_scalar("loss", loss, step)
print(loss.item())

# %%
writer.close()
torch.save(model.state_dict(), "model.pt")
print(model.load_state_dict(torch.load("model.pt")))
