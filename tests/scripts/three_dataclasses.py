"""Three dataclasses from the command line, a pad token of its own, the last rows held out, a table at the end."""

import shutil

import torch
from accelerate import PartialState
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
)
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config
from trl.experimental.ppo import PPOConfig, PPOTrainer

if __name__ == "__main__":
    script, args, model = HfArgumentParser(
        (ScriptArguments, PPOConfig, ModelConfig)
    ).parse_args_into_dataclasses()
    shutil.rmtree(args.output_dir, ignore_errors=True)

    dtype = model.dtype if model.dtype in ("auto", None) else getattr(torch, model.dtype)
    how = dict(
        revision=model.model_revision, attn_implementation=model.attn_implementation, dtype=dtype
    )
    if (quantized := get_quantization_config(model)) is not None:
        how |= dict(device_map="auto", quantization_config=quantized)
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    scorer = AutoModelForSequenceClassification.from_pretrained
    reward_model = scorer(args.reward_model_path, num_labels=1, **how)
    value_model = scorer(args.reward_model_path, num_labels=1, **how)
    policy = AutoModelForCausalLM.from_pretrained(args.sft_model_path, **how)
    peft_config = get_peft_config(model)
    reference = None
    if peft_config is None:
        reference = AutoModelForCausalLM.from_pretrained(args.sft_model_path, **how)

    rows = load_dataset("json", data_files=script.dataset_name, split=script.dataset_train_split)

    def tokenized(part):
        ids = lambda batch: {"input_ids": tokenizer(batch["prompt"], padding=False)["input_ids"]}
        return part.map(
            ids, batched=True, remove_columns=part.column_names, num_proc=args.dataset_num_proc
        )

    with PartialState().local_main_process_first():
        train = tokenized(rows.select(range(len(rows) - 4)))
        held = tokenized(rows.select(range(len(rows) - 4, len(rows))))

    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=train,
        eval_dataset=held,
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model(args.output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    trainer.generate_completions()
