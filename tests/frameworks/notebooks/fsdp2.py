"""Fully sharded data parallel of torch (fully_shard), in one process, by gloo."""

# %%
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# %%
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))

# %%
layers = [nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(*layers, nn.Linear(128, 16))
for layer in layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
print(type(model[2].weight).__name__)

# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
x, y = torch.randn(8, 12, 128), torch.randint(16, (8, 12))

# %%
for _ in range(3):
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), norm.full_tensor().item())

# %%
whole = get_model_state_dict(model)
print(len(whole), model[2].weight.full_tensor().sum().item())

# %%
weights, moments = get_state_dict(model, optimizer)
saved = dcp.save({"model": weights}, checkpoint_id="saved")

# %%
dcp.load({"model": weights}, checkpoint_id="saved")
with torch.no_grad():
    print(model(x).sum().item())

# %%
low = nn.Linear(128, 128)
fully_shard(low, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
low(x).float().sum().backward()
print(low.weight.grad.full_tensor().sum().item())

# %%
dist.destroy_process_group()
print(weights["2.weight"].to_local().sum().item(), len(moments["state"]))
