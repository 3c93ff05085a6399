"""Engines of PyTorch-Ignite: handlers, metrics, a checkpoint, an average of weights."""

# %%
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, EMAHandler, TerminateOnNan
from ignite.metrics import Accuracy, ConfusionMatrix, Loss, RunningAverage
from torch import nn

# %%
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 4))
optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
x = torch.randn(256, 64)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0))
loader = torch.utils.data.DataLoader(data, 32, shuffle=True)

# %%
trainer = create_supervised_trainer(model, optimizer, criterion)
metrics = {"accuracy": Accuracy(), "loss": Loss(criterion), "confusion": ConfusionMatrix(4)}
evaluator = create_supervised_evaluator(model, metrics)

# %%
RunningAverage(output_transform=lambda loss: loss).attach(trainer, "running")
trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
average = EMAHandler(model, momentum=0.1)
average.attach(trainer, event=Events.ITERATION_COMPLETED)

# %%
parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
saver = Checkpoint(parts, DiskSaver("saved", create_dir=True), n_saved=1)
trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
stop = EarlyStopping(3, lambda engine: engine.state.metrics["accuracy"], trainer)
evaluator.add_event_handler(Events.COMPLETED, stop)


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    evaluator.run(loader)
    print(engine.state.epoch, evaluator.state.metrics["accuracy"])


# %%
state = trainer.run(loader, max_epochs=2)
print(state.metrics)

# %%
print(evaluator.state.metrics["confusion"])

# %%
Checkpoint.load_objects(parts, torch.load(saver.last_checkpoint))

# %%
state = trainer.run(loader, max_epochs=3)
print(state.epoch, state.iteration)

# %%
print(average.ema_model(x).sum().item(), model.eval()(x).sum().item())
