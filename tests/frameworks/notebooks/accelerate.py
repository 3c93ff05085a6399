"""A loop of Accelerate: gradients over several batches, a saved state, skipped batches."""

# %%
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

set_seed(0)

# %%
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
print(accelerator.device, accelerator.num_processes)

# %%
model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
data = torch.utils.data.TensorDataset(torch.randn(128, 128), torch.randint(8, (128,)))
loader = torch.utils.data.DataLoader(data, 16, shuffle=True)

# %%
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

# %%
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
print(loss.item(), schedule.get_last_lr())

# %%
path = accelerator.save_state("state")

# %%
for x, y in accelerator.skip_first_batches(loader, 4):
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()

# %%
accelerator.load_state("state")
with torch.no_grad():
    print(model(data.tensors[0]).float().sum().item())

# %%
print(accelerator.gather_for_metrics(torch.arange(4)))
net = accelerator.unwrap_model(model)
accelerator.save_model(model, "saved")

# %%
accelerator.free_memory()
accelerator.end_training()
print(net[0].weight.sum().item())
