"""A callback that looks at the policy while it trains, which is saved by its own method."""

import sys

from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

data, sft, reward, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(sft, padding_side="left")
policy, reference = (AutoModelForCausalLM.from_pretrained(sft) for _ in range(2))
judge, value = (
    AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1) for _ in range(2)
)
prompts = sorted({row["prompt"] for row in load_dataset("json", data_files=data, split="train")})
encode = lambda row: {"input_ids": tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]}
rows = Dataset.from_list([{"prompt": x} for x in prompts]).map(encode, remove_columns=["prompt"])
episodes, owner = [], {}


class Probe(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "objective/kl" in logs:
            policy = owner["trainer"].policy_model
            training = policy.training
            policy.eval()
            assert next(policy.parameters()).isfinite().all()
            policy.train(training)
            episodes.append((logs["episode"], state.episode))


args = PPOConfig(
    output_dir=f"{output}/trainer",
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    total_episodes=12,
    num_ppo_epochs=1,
    local_rollout_forward_batch_size=4,
    response_length=4,
    stop_token="eos",
    whiten_rewards=False,
    num_sample_generations=0,
    logging_steps=1,
    report_to=[],
    seed=1,
    use_cpu=True,
    bf16=False,
    fp16=False,
    gradient_checkpointing=False,
    save_strategy="no",
)
trainer = PPOTrainer(
    args=args,
    processing_class=tokenizer,
    model=policy,
    ref_model=reference,
    reward_model=judge,
    train_dataset=rows,
    value_model=value,
    eval_dataset=rows,
    callbacks=[Probe()],
)
owner["trainer"] = trainer
trainer.train()
assert episodes == [(4, 4), (8, 8), (12, 12)], episodes
trainer.policy_model.save_pretrained(output)
