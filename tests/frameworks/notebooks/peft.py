"""LoRA of PEFT: train an adapter, save it, load it on another base, merge it."""

# %%
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

# %%
size = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
base = LlamaForCausalLM(LlamaConfig(vocab_size=512, **size))
untouched = {name: value.clone() for name, value in base.state_dict().items()}

# %%
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
print(model.get_nb_trainable_parameters())

# %%
tokens = torch.randint(512, (8, 32))
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)

# %%
for _ in range(4):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())

# %%
with model.disable_adapter(), torch.no_grad():
    print(model(tokens).logits.sum().item())

# %%
model.save_pretrained("adapter")

# %%
fresh = LlamaForCausalLM(base.config)
print(fresh.load_state_dict(untouched))
again = PeftModel.from_pretrained(fresh, "adapter")

# %%
with torch.no_grad():
    print(torch.equal(again(tokens).logits, model(tokens).logits))

# %%
merged = again.merge_and_unload()
with torch.no_grad():
    print(merged(tokens).logits.sum().item())
