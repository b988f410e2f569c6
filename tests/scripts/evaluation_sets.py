"""Several evaluation sets by name, lists of ids, a run that is counted in epochs."""

import sys

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer

data, sft, reward, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(sft, padding_side="left")
load = AutoModelForSequenceClassification.from_pretrained
rows = load_dataset("json", data_files=data, split="train")
encoded = [{"input_ids": tokenizer(prompt)["input_ids"]} for prompt in rows["prompt"]]
config = PPOConfig(
    output_dir=output,
    num_train_epochs=0.5,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    per_device_eval_batch_size=2,
    response_length=4,
    learning_rate=1e-2,
    stop_token_id=tokenizer.eos_token_id,
    report_to="none",
    use_cpu=True,
    bf16=False,
)
ppo_trainer = PPOTrainer(
    args=config,
    model=AutoModelForCausalLM.from_pretrained(sft),
    ref_model=AutoModelForCausalLM.from_pretrained(sft),
    processing_class=tokenizer,
    reward_model=load(reward, num_labels=1),
    value_model=load(reward, num_labels=1),
    train_dataset=encoded,
    eval_dataset=encoded[:4],
)
ppo_trainer.train()
assert ppo_trainer.state.episode == 8 and len(ppo_trainer.dataloader) == 4
ppo_trainer.model.value_model.train()
ppo_trainer.save_model(output)
