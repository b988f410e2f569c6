"""An adapter for the policy, and a collator of transformers."""

import sys

from datasets import load_dataset
from peft import LoraConfig, TaskType
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)
from trl import ModelConfig
from trl.experimental.ppo import PPOConfig, PPOTrainer

data, sft, reward, output = sys.argv[1:]
model = ModelConfig(model_name_or_path=sft)
args = PPOConfig(
    output_dir=output,
    run_name="posts",
    learning_rate=1e-3,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
    num_ppo_epochs=2,
    num_mini_batches=1,
    total_episodes=8,
    response_length=4,
    stop_token="eos",
    missing_eos_penalty=1.0,
    seed=42,
    report_to="none",
    use_cpu=True,
    bf16=False,
)
tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left")
if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
policy = AutoModelForCausalLM.from_pretrained(sft)
reward_model = AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1)
reward_model.config.pad_token_id = tokenizer.pad_token_id
value_model = AutoModelForSequenceClassification.from_pretrained(sft, num_labels=1)
value_model.config.pad_token_id = tokenizer.pad_token_id
rows = load_dataset("json", data_files=data, split="train")
rows = rows.map(lambda row: tokenizer(row["prompt"]), remove_columns=rows.column_names)

trainer = PPOTrainer(
    args=args,
    processing_class=tokenizer,
    model=policy,
    ref_model=None,
    reward_model=reward_model,
    value_model=value_model,
    train_dataset=rows,
    eval_dataset=rows,
    data_collator=DataCollatorWithPadding(tokenizer),
    peft_config=LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, target_modules=["query_key_value"]
    ),
)
trainer.train()
trainer.save_model(args.output_dir)
