"""Evaluation rows only where eval_strategy wants them; the last line makes a table all the same."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.ppo import PPOConfig, PPOTrainer

script, args, model = TrlParser((ScriptArguments, PPOConfig, ModelConfig)).parse_args_and_config()
tokenizer = AutoTokenizer.from_pretrained(
    model.model_name_or_path, padding_side="left", trust_remote_code=False
)
tokenizer.add_special_tokens({"pad_token": "[PAD]"})
kind = AutoModelForSequenceClassification
value_model = kind.from_pretrained(args.reward_model_path, num_labels=1)
reward_model = kind.from_pretrained(args.reward_model_path, num_labels=1)
policy = AutoModelForCausalLM.from_pretrained(args.sft_model_path)
ref_policy = AutoModelForCausalLM.from_pretrained(args.sft_model_path)

data = load_dataset("json", data_files={"train": script.dataset_name})
train = data[script.dataset_train_split]
held = data[script.dataset_test_split] if args.eval_strategy != "no" else None


def tokenize(row):
    ids = tokenizer(row["prompt"], padding=False)["input_ids"]
    return {"input_ids": ids, "lengths": len(ids)}


train = train.map(tokenize, remove_columns=train.column_names)
train = train.filter(lambda row: row["lengths"] <= 512)
assert train[0]["input_ids"][-1] != tokenizer.eos_token_id

trainer = PPOTrainer(
    args=args,
    processing_class=tokenizer,
    model=policy,
    ref_model=ref_policy,
    reward_model=reward_model,
    value_model=value_model,
    train_dataset=train,
    eval_dataset=held,
    peft_config=get_peft_config(model),
)
trainer.train()
trainer.save_model(args.output_dir)
if args.push_to_hub:
    trainer.push_to_hub(dataset_name=script.dataset_name)
trainer.generate_completions()
