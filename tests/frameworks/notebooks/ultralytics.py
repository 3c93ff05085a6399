"""A YOLO model of ultralytics: losses, training, prediction on an array."""

# %%
import os

os.environ.update(YOLO_OFFLINE="true", YOLO_CONFIG_DIR=os.getcwd(), YOLO_AUTOINSTALL="false")
import numpy as np
import torch
from ultralytics import YOLO
from ultralytics.utils import LOGGER

LOGGER.setLevel("ERROR")

# %%
yolo = YOLO("yolov8n.yaml")
print(sum(one.numel() for one in yolo.model.parameters()))

# %%
image = np.random.randint(0, 255, (96, 96, 3), dtype=np.uint8)
found = yolo.predict(image, imgsz=96, device="cpu", conf=0.0001, verbose=False, save=False)
print(len(found), found[0].boxes.xyxy.shape)

# %%
model = yolo.model.train()
for one in model.parameters():
    one.requires_grad_(True)
model.args = __import__("types").SimpleNamespace(box=7.5, cls=0.5, dfl=1.5)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
batch = dict(
    img=torch.rand(2, 3, 96, 96),
    cls=torch.zeros(3, 1),
    bboxes=torch.rand(3, 4) * 0.4 + 0.3,
    batch_idx=torch.tensor([0.0, 1.0, 1.0]),
)

# %%
for _ in range(2):
    loss, parts = model(batch)
    loss.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(parts)

# %%
torch.save(model.state_dict(), "yolo.pt")
again = YOLO("yolov8n.yaml")
print(again.model.load_state_dict(torch.load("yolo.pt")))

# %%
with torch.no_grad():
    print(again.model.eval()(batch["img"])[0].sum().item())

# %%
found = again.predict(torch.rand(1, 3, 96, 96), device="cpu", conf=0.0001, verbose=False)
print(found[0].boxes.conf[:3])

# %%
again.fuse()
with torch.no_grad():
    print(again.model(batch["img"])[0].sum().item())
