"""Distributed data parallel of torch, in one process, by gloo."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# %%
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_world_size(), dist.get_backend())

# %%
net = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 8))
model = DistributedDataParallel(net, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

# %%
data = torch.utils.data.TensorDataset(torch.randn(128, 256), torch.randint(8, (128,)))
sampler = torch.utils.data.DistributedSampler(data, 1, 0, seed=0)
loader = torch.utils.data.DataLoader(data, 32, sampler=sampler)

# %%
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
print(loss.item())

# %%
with model.no_sync():
    nn.functional.cross_entropy(model(x), y).backward()
nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()

# %%
total = loss.detach().clone()
dist.all_reduce(total)
gathered = [torch.zeros_like(x)]
dist.all_gather(gathered, x)
print(total.item(), torch.equal(gathered[0], x))

# %%
torch.save(model.module.state_dict(), "net.pt")
dist.barrier()
print(net.load_state_dict(torch.load("net.pt")))

# %%
plain = DistributedDataParallel(nn.Linear(256, 256))
for _ in range(3):
    plain(x).sum().backward()
print(plain.module.weight.grad.sum().item())

# %%
del model, plain
dist.destroy_process_group()
print(net.eval()(x).sum().item())
