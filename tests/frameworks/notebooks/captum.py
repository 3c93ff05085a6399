"""Attributions of Captum on a small image model."""

# %%
import torch
from captum.attr import (
    DeepLift,
    FeatureAblation,
    IntegratedGradients,
    LayerConductance,
    LayerGradCam,
    NeuronConductance,
    NoiseTunnel,
    Occlusion,
    ShapleyValueSampling,
)
from torch import nn

# %%
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 10)
)
images = torch.rand(4, 3, 32, 32, requires_grad=True)

# %%
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    loss = nn.functional.cross_entropy(model(images), torch.arange(4))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()

# %%
gradients = IntegratedGradients(model)
attributions, delta = gradients.attribute(
    images, target=1, n_steps=8, return_convergence_delta=True
)
print(attributions.sum().item(), delta)

# %%
lift = DeepLift(model).attribute(images, torch.zeros_like(images), target=2)
print(lift.sum().item())

# %%
cam = LayerGradCam(model, model[0]).attribute(images, target=0)
print(cam.shape, LayerGradCam.interpolate(cam, (32, 32)).sum().item())

# %%
print(Occlusion(model).attribute(images, (3, 16, 16), target=0, strides=(3, 16, 16)).sum().item())

# %%
noisy = NoiseTunnel(gradients).attribute(images, nt_samples=2, stdevs=0.1, target=1, n_steps=4)
print(noisy.abs().mean().item())

# %%
print(LayerConductance(model, model[1]).attribute(images, target=1, n_steps=4).sum().item())
print(NeuronConductance(model, model[0]).attribute(images, (0, 1, 1), target=1, n_steps=4).sum())

# %%
groups = torch.arange(4).repeat_interleave(768).reshape(1, 3, 32, 32)
print(FeatureAblation(model).attribute(images, target=0, feature_mask=groups).sum().item())

# %%
samples = ShapleyValueSampling(model).attribute(images, target=0, feature_mask=groups, n_samples=2)
torch.save(samples, "shapley.pt")
print(torch.equal(torch.load("shapley.pt"), samples))
