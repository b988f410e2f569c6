"What a run of PPO is made of besides its models, from its settings."

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_nb.base.opened import reads_end_to_end, unused_ids
from rlhf_nb.forward import Forward, PolicyAndValue, cache_tokens
from rlhf_nb.kl_control import AdaptiveKLController, FixedKLController
from rlhf_nb.rollout import Sampling
from rlhf_nb.training.config import PPOConfig
from rlhf_nb.training.layout import Layout
from rlhf_nb.training.prompts import stop_texts, stop_tokens


def make_sampling(
    args: PPOConfig, tokenizer: PreTrainedTokenizerBase, policy: nn.Module
) -> Sampling:
    "How responses are drawn, and what ends them."
    stops = () if args.stop_strings else stop_tokens(tokenizer, args.stop_token_id, policy)
    length, pad_id = args.response_length, tokenizer.pad_token_id
    texts, unused = stop_texts(tokenizer, args.stop_strings), unused_ids(policy, tokenizer)
    return Sampling(length, pad_id, stops, args.temperature, stop_strings=texts, unused_ids=unused)


def make_controller(args: PPOConfig) -> FixedKLController:
    "What sets kl_coef from update to update."
    if args.kl_controller == "adaptive":
        return AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
    return FixedKLController(args.kl_coef)


def make_forward(args: PPOConfig, pair: PolicyAndValue, layout: Layout) -> Forward:
    "How the models are called, in rollout and update alike."
    trim, tokens = args.trim_padding, args.micro_batch_tokens
    if trim is None:
        trim = layout.in_float32(pair) or reads_end_to_end(pair.policy)
    if tokens is None and layout.device.type == "cpu":
        width = pair.config.get_text_config().hidden_size
        tokens = cache_tokens(width, torch.get_num_threads())
    return Forward(
        args.temperature,
        args.local_rollout_forward_batch_size,
        None if layout.fixed_parts else tokens,
        trim,
        layout.accelerator.autocast,
        layout.most,
    )
