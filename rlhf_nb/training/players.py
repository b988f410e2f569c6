"Who plays the episodes of a run, from its settings and what it was given."

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_nb.base.encoding import template_settings
from rlhf_nb.base.fields import check_fields
from rlhf_nb.base.opened import unwrap
from rlhf_nb.playing import Player
from rlhf_nb.ppo import NO_CLIP
from rlhf_nb.training.prompts import sets_of
from rlhf_nb.training.tools import ToolEnvironment


def set_turns(
    args: Any,  # PPOConfig
    factory: Any,  # of environments, or None
    max_turns: int | None,  # as the trainer was given it; None: it was not
    max_episode_length: int | None,
) -> Any:  # settings with what the trainer was given
    """Raises ValueError on turns without an environment, and on settings that turns exclude."""
    given = dict(max_turns=max_turns, max_episode_length=max_episode_length)
    given = {name: x for name, x in given.items() if x is not None}
    if factory is None:
        if given:
            raise ValueError(f"{[*given]} is given without an environment_factory: give both.")
        if args.advantage_estimator == "gae_turns" or args.gamma_turn != 1:
            raise ValueError(
                "advantage_estimator 'gae_turns' and gamma_turn are of several turns: give an "
                "environment_factory, or take 'gae' and leave gamma_turn at 1."
            )
        return args
    if args.score_clip is not None:
        raise ValueError(NO_CLIP.format(args.score_clip))
    if args.non_eos_penalty:
        raise ValueError(
            "non_eos_penalty replaces the score of a whole response, and here are several turns: "
            "take missing_eos_penalty, which is charged for each turn that was cut off."
        )
    if not args.ds3_gather_for_generation:
        raise ValueError(
            "ds3_gather_for_generation is False, so ranks fetch weights token by token, and one "
            "whose episodes are longer would wait for ever: leave it at True with an environment."
        )
    args = copy.copy(args)  # the one given may serve another trainer
    vars(args).update(given)
    check_fields(args)
    return args


def make_player(
    factory: Any,  # of environments; None: of one turn
    trainer: Any,  # PPOTrainer, with its data
    tools: Sequence[Callable[..., Any]] = (),  # functions that the policy may call
) -> Player | None:
    """Who plays the episodes of a run; None where nothing answers. Raises ValueError now, and not
    in the first rollout, where a conversation cannot go on."""
    if factory is None and not tools:
        return None
    args, reader, settings = trainer.args, trainer.prompts, trainer.sampling_settings
    configs = (unwrap(model).config.get_text_config() for _, model in reader.models)
    known = [getattr(config, "max_position_embeddings", None) for config in configs]
    positions = min((x for x in known if x), default=None)
    limits = args.max_turns, args.max_episode_length, positions, args.environment_timeout
    more = reader.check_lengths, args.num_generations, tools
    player = Player(factory or (lambda: None), reader.tokenizer, settings, *limits, *more)
    environment = player.make()
    no_pay = isinstance(environment, ToolEnvironment) and not hasattr(environment, "get_reward")
    if no_pay and not trainer.judges.given:
        raise ValueError(
            f"{environment.inner!r} has no get_reward, and there is no reward_model: give one of "
            "them, such as a function of prompts, responses and environments."
        )
    for data in (trainer.train_dataset, *sets_of(trainer.eval_dataset).values()):
        if data is not None and "prompt" in data.column_names:
            player.try_frame(data[0]["prompt"], template_settings(data[0]))
    return player
