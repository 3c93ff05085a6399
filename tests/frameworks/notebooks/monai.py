"""MONAI: volumes, dictionary transforms, a UNet, sliding windows."""

# %%
import torch
from monai.data import CacheDataset, DataLoader, MetaTensor, decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import AsDiscrete, Compose, RandFlipd, RandSpatialCropd, ScaleIntensityd
from monai.utils import set_determinism

set_determinism(0)

# %%
volumes = []
for index in range(6):
    label = torch.zeros(1, 32, 32, 32)
    label[:, 8 : 16 + index, 8:20, 8:20] = 1
    volumes.append({"image": label + torch.rand(1, 32, 32, 32), "label": label})

# %%
both = ["image", "label"]
transform = Compose(
    [
        ScaleIntensityd("image"),
        RandSpatialCropd(both, (16, 16, 16), random_size=False),
        RandFlipd(both, prob=0.5, spatial_axis=0),
    ]
)
data = CacheDataset(volumes, transform, progress=False)
loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=0)

# %%
net = UNet(3, 1, 2, channels=(16, 32, 64), strides=(2, 2), num_res_units=1)
criterion, optimizer = (
    DiceCELoss(to_onehot_y=True, softmax=True),
    torch.optim.Adam(net.parameters()),
)

# %%
for batch in loader:
    loss = criterion(net(batch["image"]), batch["label"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), type(batch["image"]).__name__)

# %%
whole = torch.stack([one["image"] for one in volumes])
with torch.no_grad():
    found = sliding_window_inference(whole, (16, 16, 16), 2, net.eval(), overlap=0.25)
print(found.sum().item())

# %%
dice = DiceMetric(include_background=False)
to_classes = AsDiscrete(argmax=True, to_onehot=2)
dice(
    [to_classes(one) for one in decollate_batch(found)],
    [AsDiscrete(to_onehot=2)(one["label"]) for one in volumes],
)
print(dice.aggregate().item())

# %%
torch.save(net.state_dict(), "net.pt")
print(net.load_state_dict(torch.load("net.pt")))

# %%
image = MetaTensor(volumes[0]["image"], affine=torch.eye(4))
print(image.mean().item(), image.affine.sum().item(), net(image[None])[0].sum().item())
