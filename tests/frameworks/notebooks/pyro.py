"""Pyro: variational inference with a global parameter store, then Hamiltonian Monte Carlo."""

# %%
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.nn import PyroModule, PyroSample

pyro.set_rng_seed(0)
x = torch.randn(200, 3)
y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(200)


# %%
class Regression(PyroModule):
    def __init__(self):
        super().__init__()
        self.linear = PyroModule[torch.nn.Linear](3, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))

    def forward(self, x, y=None):
        mean = self.linear(x).squeeze(-1)
        noise = pyro.sample("noise", dist.LogNormal(-2.0, 0.5))
        with pyro.plate("data", len(x)):
            pyro.sample("observed", dist.Normal(mean, noise), obs=y)
        return mean


# %%
model = Regression()
guide = AutoMultivariateNormal(model)
inference = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), Trace_ELBO())

# %%
for _ in range(30):
    loss = inference.step(x, y)
print(loss)

# %%
print({name: value.shape for name, value in pyro.get_param_store().items()})

# %%
samples = Predictive(model, guide=guide, num_samples=20)(x)
print(samples["observed"].mean().item())

# %%
pyro.get_param_store().save("parameters.pt")
pyro.clear_param_store()
pyro.get_param_store().load("parameters.pt")

# %%
for _ in range(5):
    loss = inference.step(x, y)
print(loss)


# %%
def plain(x, y):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("observed", dist.Normal(x @ weight, 0.1), obs=y)


chain = MCMC(NUTS(plain, jit_compile=False), num_samples=10, warmup_steps=10, disable_progbar=True)

# %%
chain.run(x, y)
print(chain.get_samples()["weight"].mean(0))
