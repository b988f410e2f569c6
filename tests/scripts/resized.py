"""Embeddings that the script resizes itself, positional arguments, a copy as the reference."""

import copy
import sys

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer

data, sft, reward, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(sft, padding_side="left")
tokenizer.add_special_tokens({"pad_token": "[PAD]", "additional_special_tokens": ["<think>"]})
policy = AutoModelForCausalLM.from_pretrained(sft)
value_model = AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1)
reward_model = AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1)
for model in (policy, value_model, reward_model):
    model.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id
args = PPOConfig(
    output_dir=output,
    total_episodes=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_mini_batches=2,
    batch_size=None,
    mini_batch_size=None,
    response_length=4,
    stop_token_id=tokenizer.eos_token_id,
    learning_rate=1e-3,
    gradient_checkpointing=False,
    report_to="none",
    use_cpu=True,
    bf16=False,
)
rows = load_dataset("json", data_files=data, split="train")
rows = rows.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}).select_columns(
    ["input_ids"]
)
trainer = PPOTrainer(
    args, tokenizer, policy, copy.deepcopy(policy), reward_model, rows, value_model, None, rows
)
trainer.train()
trainer.save_model(output)
trainer.generate_completions(sampling=True)
