"""A factory that is handed the trainer's class, a length in steps, and no evaluation."""

import sys

from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer


def build(factory, data, sft, reward, output):
    tokenizer = AutoTokenizer.from_pretrained(sft, padding_side="left")
    args = PPOConfig(
        output_dir=output,
        seed=7,
        bf16=False,
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        response_length=4,
        temperature=0.9,
        num_ppo_epochs=1,
        total_episodes=8,
        local_rollout_forward_batch_size=4,
        gradient_checkpointing=True,
    )
    rows = load_dataset("json", data_files=data, split="train")
    ids = [tokenizer(prompt)["input_ids"] for prompt in rows["prompt"]]
    scorer = AutoModelForSequenceClassification.from_pretrained
    return factory(
        args=args,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(sft),
        ref_model=AutoModelForCausalLM.from_pretrained(sft),
        reward_model=scorer(reward, num_labels=1),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        value_model=scorer(reward, num_labels=1),
        eval_dataset=Dataset.from_dict({"input_ids": ids[:4]}),
    )


trainer = build(PPOTrainer, *sys.argv[1:])
trainer.train()
trainer.save_model(sys.argv[-1])
