"""A Gaussian process of GPyTorch: exact and with inducing points."""

# %%
import gpytorch
import torch

x = torch.linspace(0, 1, 200)
y = torch.sin(6 * x) + 0.1 * torch.randn(200)


# %%
class Exact(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


# %%
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Exact(x, y, likelihood)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

# %%
for _ in range(10):
    optimizer.zero_grad()
    loss = -objective(model(x), y)
    loss.backward()
    optimizer.step()
print(loss.item())

# %%
model.eval(), likelihood.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    found = likelihood(model(torch.linspace(0, 1.2, 60)))
print(found.mean.sum().item(), found.variance.sum().item())

# %%
print(found.sample(torch.Size([2])).sum().item())

# %%
torch.save(model.state_dict(), "gp.pt")
again = Exact(x, y, gpytorch.likelihoods.GaussianLikelihood())
print(again.load_state_dict(torch.load("gp.pt")))


# %%
class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self, points):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
        self.mean, self.kernel = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


# %%
sparse, noise = Sparse(x[::10, None].clone()), gpytorch.likelihoods.GaussianLikelihood()
optimizer = torch.optim.Adam([*sparse.parameters(), *noise.parameters()], lr=0.05)
bound = gpytorch.mlls.VariationalELBO(noise, sparse, len(x))
for _ in range(5):
    optimizer.zero_grad()
    loss = -bound(sparse(x[:, None]), y)
    loss.backward()
    optimizer.step()
print(loss.item())

# %%
with torch.no_grad():
    print(again.eval()(x[:5]).mean, sparse.eval()(x[:5, None]).variance)
