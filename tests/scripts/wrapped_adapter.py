"""A policy that is a PeftModel already, a frozen reward model, a value model whose head alone learns,
settings filtered by what the config takes."""

import inspect
import sys

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

try:
    from trl.experimental.ppo import PPOConfig, PPOTrainer
except ImportError:
    from trl import PPOConfig, PPOTrainer

data, sft, reward, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(sft)
tokenizer.padding_side = "left"
policy = AutoModelForCausalLM.from_pretrained(sft)
policy.config.eos_token_id = tokenizer.eos_token_id
policy.config.pad_token_id = tokenizer.pad_token_id
policy.generation_config.eos_token_id = tokenizer.eos_token_id
policy = get_peft_model(
    policy, LoraConfig(r=4, target_modules=["query_key_value"], task_type="CAUSAL_LM")
)
reward_model = AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1)
reward_model.requires_grad_(False).eval()
value_model = AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1)
for weight in getattr(value_model, value_model.base_model_prefix).parameters():
    weight.requires_grad = False

rows = load_dataset("json", data_files=data, split="train")


def encode(row):
    found = tokenizer(row["prompt"], truncation=True, max_length=32, add_special_tokens=False)
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}


rows = rows.map(encode, remove_columns=rows.column_names)
wanted = dict(
    output_dir=output,
    learning_rate=1e-2,
    num_train_epochs=1.0,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=1,
    response_length=4,
    num_mini_batches=1,
    num_ppo_epochs=2,
    temperature=1.0,
    kl_coef=0.05,
    gamma=1.0,
    lam=0.95,
    local_rollout_forward_batch_size=4,
    stop_token="eos",
    missing_eos_penalty=1.0,
    report_to="none",
    remove_unused_columns=False,
    bf16=False,
    use_cpu=True,
    total_episodes=8,
)
known = inspect.signature(PPOConfig.__init__).parameters
trainer = PPOTrainer(
    **dict(
        args=PPOConfig(**{name: x for name, x in wanted.items() if name in known}),
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=rows,
        eval_dataset=rows,
    )
)
trainer.train()
trainer.save_model(output)
