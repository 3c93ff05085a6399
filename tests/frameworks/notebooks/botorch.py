"""Bayesian optimization of BoTorch: a surrogate, an acquisition function, the next points."""

# %%
import warnings

import torch
from botorch.acquisition import LogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.mlls import ExactMarginalLogLikelihood

warnings.filterwarnings("ignore")
bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)


# %%
def value(x):
    return -((x - 0.3) ** 2).sum(-1, keepdim=True)


points = draw_sobol_samples(bounds, 12, 1, seed=0).squeeze(1)
values = value(points)

# %%
model = SingleTaskGP(points, values, outcome_transform=Standardize(m=1))
objective = ExactMarginalLogLikelihood(model.likelihood, model)

# %%
fit_gpytorch_mll(objective, optimizer_kwargs={"options": {"maxiter": 20}})
print(model.covar_module.lengthscale)

# %%
acquire = LogExpectedImprovement(model, best_f=values.max())
point, gain = optimize_acqf(acquire, bounds, q=1, num_restarts=2, raw_samples=16)
print(point, gain)

# %%
points, values = torch.cat([points, point]), torch.cat([values, value(point)])
model = SingleTaskGP(points, values, outcome_transform=Standardize(m=1))
model.load_state_dict(model.state_dict())

# %%
sampler = SobolQMCNormalSampler(torch.Size([32]), seed=0)
batch = qLogNoisyExpectedImprovement(model, points, sampler=sampler, prune_baseline=True)

# %%
chosen, gains = optimize_acqf(
    batch, bounds, q=2, num_restarts=2, raw_samples=16, options={"maxiter": 10}
)
print(chosen)

# %%
model = model.condition_on_observations(chosen, value(chosen))
print(model.posterior(chosen).mean, model.posterior(chosen).variance)

# %%
torch.save(model.state_dict(), "model.pt")
print(sorted(torch.load("model.pt"))[:3], values.max())
