"What runs of tests share, in one process and in workers: small settings, prompts, a reward."

from __future__ import annotations

QUIET = dict(use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1)
RUN = dict(  # one update is 8 rows, 5 tokens each; a third of the rows stop
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    response_length=5,
    temperature=1.0,
    learning_rate=1e-3,
    num_sample_generations=0,
    seed=0,
)
OF_RANKS = RUN | dict(per_device_train_batch_size=2, response_length=6, learning_rate=1e-2, seed=5)
SAVED = dict(save_strategy="steps", save_steps=1, save_rollouts=True)
TOLD = [f"tell {i} of {chr(97 + i % 20)}" for i in range(24)]  # the prompts of workers
TIMES = ("time/", "tokens/per_second", "eps", "train_")  # metrics that two runs never share
# a conversation as [user]..[assistant].., with EOS behind each answer
TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{{ eos_token + '\\n' if "
    "m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def turn(role: str, content: object) -> dict:
    return dict(role=role, content=content)


def likes_a(prompts, responses, **columns):
    return [response.count("a") - 0.1 * len(response) for response in responses]


def likes_c(prompts, responses, **columns):
    return [response.count("c") - 0.1 * len(response) for response in responses]


def untimed(log: dict) -> dict:
    return {name: value for name, value in log.items() if not name.startswith(TIMES)}
