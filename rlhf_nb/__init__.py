"""Learn, run and trust RLHF with PPO: literate notebooks that are the package."""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_nb.cli.scripts import (
        ModelConfig,
        ScriptArguments,
        TrlParser,
        create_reference_model,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )
    from rlhf_nb.diagnose.preflight import preflight
    from rlhf_nb.diagnose.replay import replay
    from rlhf_nb.reward import RewardConfig, RewardTrainer
    from rlhf_nb.rollout import Rollout
    from rlhf_nb.sft import SFTConfig, SFTTrainer
    from rlhf_nb.trainer import PPOConfig, PPOTrainer
    from rlhf_nb.training.saving import rollouts
    from rlhf_nb.ui.dashboard import LiveDashboard
    from rlhf_nb.ui.preferences import label_preferences
    from rlhf_nb.ui.viewer import browse, view

_NAMES = {  # module -> its names
    "cli.scripts": (  # of people's own, with other import lines alone
        "SIMPLE_CHAT_TEMPLATE ModelConfig ScriptArguments TrlParser create_reference_model "
        "get_kbit_device_map get_peft_config get_quantization_config"
    ),
    "diagnose.preflight": "preflight",
    "diagnose.replay": "replay",
    "reward": "RewardConfig RewardTrainer",
    "rollout": "Rollout",
    "sft": "SFTConfig SFTTrainer",
    "trainer": "PPOConfig PPOTrainer",
    "training.saving": "rollouts",
    "ui.dashboard": "LiveDashboard",
    "ui.preferences": "label_preferences",
    "ui.viewer": "browse view",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [
    "LiveDashboard",
    "ModelConfig",
    "PPOConfig",
    "PPOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "Rollout",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "TrlParser",
    "browse",
    "create_reference_model",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
    "label_preferences",
    "preflight",
    "replay",
    "rollouts",
    "view",
]


def __getattr__(name: str) -> Any:
    "A module is imported when one of its names is used: `rlhf-nb --help` answers without torch."
    if name not in _MODULES:
        from rlhf_nb.training.compat import no_import

        if (renamed := no_import(name)) is not None:
            raise renamed
        raise AttributeError(f"module 'rlhf_nb' has no attribute {name!r}")
    return getattr(import_module(f"rlhf_nb.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name[0] == "_")])
