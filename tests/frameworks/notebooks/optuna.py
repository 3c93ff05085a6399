"""A study of Optuna that trains small networks, with pruning and a database."""

# %%
import optuna
import torch
from torch import nn

optuna.logging.set_verbosity(optuna.logging.ERROR)

# %%
x = torch.randn(512, 64)
y = x[:, :8].sum(1, keepdim=True).tanh()
best = {}


# %%
def objective(trial):
    width = trial.suggest_int("width", 16, 256, log=True)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(
        model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    )
    for step in range(6):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trial.report(loss.item(), step)
        if trial.should_prune():
            raise optuna.TrialPruned()
    best[trial.number] = model
    return loss.item()


# %%
study = optuna.create_study(
    storage="sqlite:///study.db",
    sampler=optuna.samplers.TPESampler(seed=0),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
)

# %%
study.optimize(objective, n_trials=4)
print(study.best_value, study.best_params)

# %%
study.optimize(objective, n_trials=4)
print([trial.state.name for trial in study.trials])

# %%
study.enqueue_trial({"width": 32, "lr": 1e-2})
study.optimize(objective, n_trials=1)

# %%
print(
    optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
    )
)

# %%
model = best[study.best_trial.number]
torch.save(model, "best.pt")
again = torch.load("best.pt", weights_only=False)
print(torch.equal(again(x), model(x)))
