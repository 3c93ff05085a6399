"""Skorch: a network as an estimator of scikit-learn, in a pipeline and a grid search."""

# %%
import pickle

import numpy as np
import torch
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint, EpochScoring, LRScheduler
from torch import nn

# %%
x = np.random.randn(300, 32).astype(np.float32)
y = (x[:, :4].sum(1) > 0).astype(np.int64)


# %%
class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x):
        return self.net(x)


# %%
net = NeuralNetClassifier(
    Net,
    criterion=nn.CrossEntropyLoss,
    max_epochs=3,
    lr=0.1,
    verbose=0,
    iterator_train__shuffle=True,
    callbacks=[
        EpochScoring("roc_auc", lower_is_better=False),
        LRScheduler("StepLR", step_size=2),
        Checkpoint(dirname="saved"),
    ],
)

# %%
net.fit(x, y)
print(net.history[:, ("train_loss", "valid_acc")])

# %%
print(net.predict_proba(x[:3]))

# %%
pipeline = make_pipeline(StandardScaler(), NeuralNetClassifier(Net, max_epochs=2, verbose=0))
print(cross_val_score(pipeline, x, y, cv=2))

# %%
search = GridSearchCV(
    NeuralNetClassifier(Net, max_epochs=2, verbose=0, train_split=None),
    {"lr": [0.01, 0.1], "module__width": [64, 256]},
    cv=2,
    scoring="accuracy",
)
search.fit(x, y)
print(search.best_params_, search.best_score_)
del search.cv_results_  # it has times

# %%
with open("net.pickle", "wb") as file:
    pickle.dump(net, file)
with open("net.pickle", "rb") as file:
    again = pickle.load(file)
print((again.predict(x) == net.predict(x)).all())

# %%
net.partial_fit(x, y)
net.save_params(f_params="net.pt")
print(torch.load("net.pt")["net.0.weight"].sum())
