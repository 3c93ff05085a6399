"""TorchRL and tensordict: a replay buffer, an actor, the losses of DDPG."""

# %%
import os

os.environ["RL_LOGGING_LEVEL"] = "WARNING"  # its other lines have the time
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import DDPGLoss, SoftUpdate


# %%
def steps(count):
    """Transitions of an environment that moves by its action."""
    state, action = torch.randn(count, 8), torch.rand(count, 2) * 2 - 1
    done = torch.rand(count, 1) > 0.9
    after = state + action.repeat(1, 4)
    following = dict(
        observation=after, reward=-after.norm(dim=1, keepdim=True), done=done, terminated=done
    )
    return TensorDict(dict(observation=state, action=action, next=following), batch_size=count)


# %%
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(2048), batch_size=64)
indices = buffer.extend(steps(2048))

# %%
actor = TensorDictModule(
    nn.Sequential(MLP(8, 2, num_cells=[128]), nn.Tanh()), ["observation"], ["action"]
)
critic = ValueOperator(
    MLP(10, 1, num_cells=[128]), in_keys=["observation", "action"], out_keys=["state_action_value"]
)

# %%
loss = DDPGLoss(actor, critic, delay_value=True)
target = SoftUpdate(loss, eps=0.95)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)

# %%
for _ in range(5):
    found = loss(buffer.sample())
    (found["loss_actor"] + found["loss_value"]).backward()
    optimizer.step()
    optimizer.zero_grad()
    target.step()
print(found["loss_value"].item())

# %%
print(TensorDictSequential(actor, critic)(steps(4))["state_action_value"])

# %%
buffer.dumps("buffer")
again = TensorDictReplayBuffer(storage=LazyTensorStorage(2048), batch_size=64)
again.loads("buffer")
print(len(again), again[:3]["action"])

# %%
on_disk = TensorDictReplayBuffer(storage=LazyMemmapStorage(64, scratch_dir="disk"), batch_size=8)
on_disk.extend(steps(64))
print(on_disk.sample().shape)

# %%
weights = TensorDict.from_module(actor)
with weights.data.clone().to_module(actor):
    print(actor(steps(2))["action"])

# %%
stacked = torch.stack([steps(4), steps(4)])
print(stacked.apply(lambda one: one * 2)["next", "reward"].sum())
