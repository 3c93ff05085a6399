"""A Learner of fastai on pictures in memory: learning rate finder, one cycle, export."""

# %%
import numpy as np
import torch
from fastai.callback.schedule import Learner
from fastai.data.core import DataLoaders
from fastai.metrics import accuracy
from torch import nn

# %%
labels = torch.randint(3, (128,))
images = torch.rand(128, 3, 16, 16) + labels[:, None, None, None]
pairs = list(zip(images, labels, strict=True))

# %%
loaders = DataLoaders.from_dsets(pairs[:96], pairs[96:], bs=16, num_workers=0, device="cpu")

# %%
body = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
net = nn.Sequential(body, nn.Flatten(), nn.Linear(32, 3))
learner = Learner(loaders, net, loss_func=nn.CrossEntropyLoss(), metrics=accuracy)

# %%
with learner.no_logging():
    print(learner.lr_find(num_it=20, show_plot=False))

# %%
with learner.no_logging():
    learner.fit_one_cycle(2, 1e-2)
print(np.array(learner.recorder.losses).mean())

# %%
print(learner.validate())

# %%
learner.save("learner")
with learner.no_logging():
    learner.fit(1)

# %%
learner.load("learner")
scores, _ = learner.get_preds()
print(scores.argmax(1))

# %%
learner.freeze()
print(learner.opt.hypers[0]["lr"], sum(one.sum().item() for one in net.parameters()))
