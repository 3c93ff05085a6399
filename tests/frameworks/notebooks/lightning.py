"""A Lightning module, trained by a Trainer with a checkpoint."""

# %%
import logging
import warnings

import lightning
import torch
from torch import nn

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
lightning.seed_everything(0, verbose=False)


# %%
class Net(lightning.LightningModule):
    def __init__(self, width=256):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("validation", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# %%
x = torch.randn(256, 64)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
train = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
held_out = torch.utils.data.DataLoader(data, batch_size=64)

# %%
model = Net()
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, default_root_dir="out", **quiet)

# %%
trainer.fit(model, train, held_out)

# %%
print(trainer.callback_metrics)

# %%
trainer.save_checkpoint("net.ckpt")
again = Net.load_from_checkpoint("net.ckpt", weights_only=False)

# %%
print(trainer.validate(again, held_out, verbose=False))

# %%
more = lightning.Trainer(accelerator="cpu", max_epochs=4, enable_checkpointing=False, **quiet)
more.fit(again, train, ckpt_path="net.ckpt", weights_only=False)

# %%
print(again.net[0].weight.sum().item(), len(more.optimizers[0].state))
