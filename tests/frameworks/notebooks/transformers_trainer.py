"""A small causal language model, trained by the Trainer of transformers, which then generates."""

# %%
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

# %%
size = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
config = LlamaConfig(vocab_size=512, num_key_value_heads=2, pad_token_id=0, **size)
model = LlamaForCausalLM(config)

# %%
tokens = torch.randint(1, 512, (64, 32))
data = [{"input_ids": row, "labels": row} for row in tokens]

# %%
arguments = TrainingArguments(
    "out",
    max_steps=6,
    per_device_train_batch_size=8,
    save_steps=3,
    report_to=[],
    disable_tqdm=True,
    logging_strategy="no",
    use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:16])
trainer.remove_callback(PrinterCallback)  # it prints times

# %%
result = trainer.train()
print(result.global_step, result.training_loss)

# %%
print(trainer.evaluate()["eval_loss"])

# %%
model.save_pretrained("saved")
again = LlamaForCausalLM.from_pretrained("saved")

# %%
print(model.generate(tokens[:2, :8], max_new_tokens=8, do_sample=False))

# %%
print(again.generate(tokens[:2, :8], max_new_tokens=8, do_sample=True, attention_mask=None))

# %%
trainer.args.max_steps = 9
print(trainer.train(resume_from_checkpoint="out/checkpoint-6").global_step)

# %%
with torch.no_grad():
    print(trainer.model(tokens[:4]).logits.sum().item())
