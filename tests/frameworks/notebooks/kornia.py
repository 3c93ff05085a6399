"""Kornia: augmentations that keep their parameters, geometry, edges, a fitted homography."""

# %%
import kornia
import kornia.augmentation as K
import torch

# %%
images = torch.rand(8, 3, 64, 64)
boxes = torch.tensor([[[10.0, 10.0, 30.0, 30.0]]]).repeat(8, 1, 1)

# %%
augment = K.AugmentationSequential(
    K.RandomAffine(20.0, p=1.0),
    K.ColorJiggle(0.1, 0.1, 0.1, 0.1, p=1.0),
    K.RandomHorizontalFlip(p=0.5),
    data_keys=["input", "bbox_xyxy"],
)

# %%
changed, moved = augment(images, boxes)
print(changed.sum().item(), moved[0])

# %%
print(torch.allclose(augment(images, boxes, params=augment._params)[0], changed))

# %%
edges = kornia.filters.sobel(kornia.color.rgb_to_grayscale(images))
blurred = kornia.filters.gaussian_blur2d(images, (5, 5), (1.5, 1.5))
print(edges.sum().item(), blurred.sum().item())

# %%
homography = torch.nn.Parameter(torch.eye(3)[None])
optimizer = torch.optim.Adam([homography], lr=1e-3)
for _ in range(5):
    warped = kornia.geometry.warp_perspective(images[:1], homography, (64, 64))
    loss = (warped - blurred[:1]).abs().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), homography.detach())

# %%
similarity = kornia.metrics.ssim(images, blurred, 5)
print(similarity.mean().item(), kornia.losses.total_variation(images).sum().item())

# %%
corners = kornia.feature.harris_response(images[:, :1], k=0.04)
descriptor = kornia.feature.SIFTDescriptor(32)
print(corners.mean().item(), descriptor(images[:, :1, :32, :32]).sum().item())

# %%
net = torch.nn.Sequential(K.RandomGaussianNoise(p=1.0), torch.nn.Conv2d(3, 8, 3))
net(images).mean().backward()
torch.save(net.state_dict(), "net.pt")
print(net.load_state_dict(torch.load("net.pt")), net[1].weight.grad.sum().item())

# %%
quaternion = kornia.geometry.Quaternion.random(4)
print(kornia.geometry.rotation_matrix_to_axis_angle(quaternion.matrix()))
