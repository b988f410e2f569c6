"""A loop by hand: queries, responses and scores, a value head on the policy."""

import sys

import torch
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

data, sft, reward, output = sys.argv[1:]
config = PPOConfig(
    model_name=sft, learning_rate=1e-5, batch_size=1, mini_batch_size=1, init_kl_coef=0.2
)
tokenizer = AutoTokenizer.from_pretrained(sft)
model = AutoModelForCausalLMWithValueHead.from_pretrained(sft)
trainer = PPOTrainer(config, model, None, tokenizer)
query = tokenizer.encode("abc", return_tensors="pt")[0]
response = trainer.generate([query], max_new_tokens=4)[0]
stats = trainer.step([query], [response], [torch.tensor(1.0)])
