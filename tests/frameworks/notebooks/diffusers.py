"""A small UNet of diffusers: some steps of training, then the pipeline draws an image."""

# %%
import torch
from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel

# %%
blocks = dict(down_block_types=("DownBlock2D", "AttnDownBlock2D"), block_out_channels=(32, 64))
unet = UNet2DModel(16, 3, 3, up_block_types=("AttnUpBlock2D", "UpBlock2D"), **blocks)
print(unet.num_parameters())

# %%
noises = DDPMScheduler(num_train_timesteps=50)
average = EMAModel(unet.parameters(), decay=0.9)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
images = torch.rand(8, 3, 16, 16) * 2 - 1

# %%
for _ in range(3):
    noise, moment = torch.randn_like(images), torch.randint(50, (8,))
    found = unet(noises.add_noise(images, noise, moment), moment).sample
    loss = torch.nn.functional.mse_loss(found, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.step(unet.parameters())
print(loss.item())

# %%
average.store(unet.parameters())
average.copy_to(unet.parameters())

# %%
pipeline = DDPMPipeline(unet, noises)
pipeline.set_progress_bar_config(disable=True)

# %%
drawn = pipeline(
    2, torch.Generator().manual_seed(1), num_inference_steps=3, output_type="np"
).images
print(drawn.shape, drawn.mean())

# %%
pipeline.save_pretrained("pipeline")
again = DDPMPipeline.from_pretrained("pipeline")

# %%
again.scheduler = DDIMScheduler.from_config(again.scheduler.config)
again.set_progress_bar_config(disable=True)
print(
    again(1, torch.Generator().manual_seed(1), num_inference_steps=2, output_type="np").images.sum()
)

# %%
average.restore(unet.parameters())
print(sum(one.sum().item() for one in unet.parameters()))
