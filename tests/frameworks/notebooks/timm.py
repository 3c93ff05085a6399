"""Image models of timm: data augmentation, EMA, a schedule, features."""

# %%
import timm
import torch
from timm.data import Mixup, create_transform
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

# %%
model = timm.create_model("resnet10t", num_classes=10)
vit = timm.create_model(
    "vit_tiny_patch16_224", img_size=64, num_classes=10, depth=2, embed_dim=96, num_heads=3
)

# %%
print(create_transform(64, is_training=False))
images, labels = torch.rand(16, 3, 64, 64), torch.randint(10, (16,))
mixed, targets = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10)(images, labels)

# %%
optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-3)
schedule, average = CosineLRScheduler(optimizer, t_initial=4), ModelEmaV3(model, decay=0.9)

# %%
for epoch in range(3):
    loss = SoftTargetCrossEntropy()(model(mixed), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step(epoch + 1)
    average.update(model)
print(loss.item())

# %%
model.eval()
with torch.no_grad():
    print(model(images).argmax(1))

# %%
features = timm.create_model("resnet10t", features_only=True)
print([tuple(one.shape) for one in features(images[:2])])

# %%
torch.save(model.state_dict(), "model.pt")
again = timm.create_model("resnet10t", num_classes=10, checkpoint_path="model.pt").eval()

# %%
with torch.inference_mode():
    print(torch.equal(again(images), model(images)), vit(images).sum().item())

# %%
again.reset_classifier(3)
print(again(images[:1]).shape, average.module(images).sum().item())
