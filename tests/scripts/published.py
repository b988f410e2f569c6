"""A script for the published trainer (trl 1.12.0, `trl.experimental.ppo`): summaries of posts,
with models and data from folders.

python published.py DATA SFT_MODEL REWARD_MODEL OUTPUT
"""

import sys

from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer

data_path, sft_path, reward_path, output = sys.argv[1:]

training_args = PPOConfig(
    output_dir=output,
    learning_rate=1e-3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_mini_batches=2,
    num_ppo_epochs=2,
    total_episodes=32,
    sft_model_path=sft_path,
    reward_model_path=reward_path,
    missing_eos_penalty=1.0,
    stop_token="eos",
    response_length=8,
    local_rollout_forward_batch_size=8,
    num_sample_generations=2,
    kl_estimator="k3",
    report_to="none",
    use_cpu=True,
    logging_steps=1,
    seed=3,
)

tokenizer = AutoTokenizer.from_pretrained(sft_path, padding_side="left")
if tokenizer.pad_token is None:
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
reward_model = AutoModelForSequenceClassification.from_pretrained(
    training_args.reward_model_path, num_labels=1
)
value_model = AutoModelForSequenceClassification.from_pretrained(
    training_args.reward_model_path, num_labels=1
)


def tokenize(row):
    ids = tokenizer(row["prompt"], padding=False)["input_ids"]
    return {"input_ids": ids, "lengths": len(ids)}


dataset = load_from_disk(data_path)
train_dataset = dataset["train"].map(tokenize, remove_columns=dataset["train"].column_names)
eval_dataset = dataset["test"].map(tokenize, remove_columns=dataset["test"].column_names)
train_dataset = train_dataset.filter(lambda row: row["lengths"] <= 96)

trainer = PPOTrainer(
    args=training_args,
    processing_class=tokenizer,
    model=policy,
    ref_model=ref_policy,
    reward_model=reward_model,
    value_model=value_model,
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
)
trainer.train()
trainer.save_model(training_args.output_dir)
trainer.generate_completions()
