"""The reference made by a helper of the library, names from argparse, data from a folder."""

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import create_reference_model
from trl.experimental.ppo import PPOConfig, PPOTrainer


def main():
    parser = argparse.ArgumentParser()
    for name in ("data", "model", "reward_model", "output_dir"):
        parser.add_argument(name)
    asked = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(asked.model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(asked.model)
    reference = create_reference_model(policy)
    judge = AutoModelForSequenceClassification.from_pretrained(asked.reward_model, num_labels=1)
    value = AutoModelForSequenceClassification.from_pretrained(asked.reward_model, num_labels=1)
    rows = load_dataset("json", data_files=asked.data, split="train")
    rows = rows.map(lambda x: tokenizer(x["prompt"]), remove_columns=rows.column_names)
    parts = rows.train_test_split(test_size=4, seed=0)
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=asked.output_dir,
            total_episodes=8,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=2,
            response_length=4,
            learning_rate=1e-3,
            eval_strategy="steps",
            eval_steps=1,
            num_sample_generations=2,
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=judge,
        value_model=value,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
    )
    trainer.train()
    trainer.save_model(asked.output_dir)


if __name__ == "__main__":
    main()
