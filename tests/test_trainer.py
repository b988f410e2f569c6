"""The four phases and the loop around them: identities, formulas in numpy, counts, resume, bad
input."""

import json
import math
import random
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from ppo_fixtures import (
    BEST,
    PROMPTS,
    SIZES,
    STOP,
    check_best,
    check_damaged,
    likes_c,
    logs,
    rollouts,
    scored,
    unlike,
    untimed,
    weights,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import notebook

import rlhf_nb.training.layout
from rlhf_nb.checkpoint import verify
from rlhf_nb.models import scorer_from
from rlhf_nb.trainer import PPOTrainer
from rlhf_nb.training import loop
from rlhf_nb.training.layout import Offloaded
from rlhf_nb.training.model_loading import tiny_policy
from rlhf_nb.ui.shown import PROGRESS, updates_markup

# The twenty faults of the published trainer have their tests in test_published_faults.py.


# ---- Identities ----


# catches: log-probs of the column beside, of the sampler's truncated distribution, a value read
# after its token, positions that count padding
def test_a_rollout_by_hand(ppo, letters):
    trainer = ppo(temperature=0.7)
    r, policy, value = trainer.rollout(PROMPTS), trainer.model.policy, trainer.model.value
    assert r.responses == [
        letters.decode([i for i in row[keep].tolist() if i != STOP])
        for row, keep in zip(r.response_ids, r.mask)
    ]
    assert r.prompts == PROMPTS
    for b in range(len(r)):
        prompt, answer = r.prompt_ids[b][r.prompt_mask[b]], r.response_ids[b][r.mask[b]]
        logp = (policy(torch.cat([prompt, answer])[None]).logits[0] / 0.7).log_softmax(-1)[
            len(prompt) - 1 : -1
        ]
        hidden = value.base_model(torch.cat([prompt, answer])[None]).last_hidden_state[0]
        n = len(answer)
        assert torch.allclose(r.logprobs[b, :n], logp.gather(1, answer[:, None])[:, 0], atol=1e-5)
        assert torch.allclose(r.ref_logprobs[b, :n], r.logprobs[b, :n], atol=1e-6)
        assert (
            torch.allclose(r.values[b, :n], value.score(hidden)[len(prompt) - 1 : -1, 0], atol=1e-5)
            and not r.values[b, n:].any()
        )


# ---- Scores ----


# catches: the penalty normalised or clipped away, moments that forget the earlier batches
def test_scores_are_normalised_and_clipped_before_the_penalty(ppo):
    trainer = ppo(normalize_scores=True, score_clip=0.5, missing_eos_penalty=1.0)
    first, second = scored(trainer), scored(trainer)
    seen = np.concatenate([first.raw_scores.numpy(), second.raw_scores.numpy()]).astype(float)
    wanted = (
        np.clip((second.raw_scores.numpy() - seen.mean()) / seen.std(ddof=1), -0.5, 0.5)
        - ~second.stopped.numpy()
    )
    assert second.scores.numpy() == pytest.approx(wanted, abs=1e-5)
    assert first.raw_scores.tolist() == pytest.approx(likes_c(first.prompts, first.responses))


# catches: a model asked while it is away, fetched once for each chunk, left on the device, or
# copied back; numbers that change with the place
@pytest.mark.parametrize("estimator, visits", [("k1", 1), ("full", 2)])
def test_frozen_models_are_offloaded_between_uses(ppo, letters, monkeypatch, estimator, visits):
    fetched, away, wrappers = [], [], []

    class Watched(Offloaded):
        def __init__(self, model, device):
            super().__init__(model, device, self.carry)
            self.name = type(model).__name__
            wrappers.append(self)
            model.base_model.register_forward_pre_hook(lambda *_: away.append(self.depth))

        def carry(self, weight):
            fetched.append(self.name)
            return weight.clone()

    monkeypatch.setattr(rlhf_nb.training.layout, "Offloaded", Watched)

    def run(**changes):
        torch.manual_seed(0)
        trainer = ppo.trained(
            scorer_from(tiny_policy(letters, 5, **SIZES), 5),
            kl_estimator=estimator,
            local_rollout_forward_batch_size=3,
            learning_rate=1e-2,
            num_ppo_epochs=1,
            **changes,
        )
        return trainer, [untimed(log) for log in logs(trainer)], trainer.evaluate()

    (plain, *told), (rested, *same) = run(), run(offload_frozen=True)
    assert told == same
    assert not unlike(weights(plain), weights(rested))
    assert "in host memory" in rested.describe()
    assert "in host memory" not in plain.describe()
    count = lambda model: sum(1 for _ in model.parameters())
    # three updates, and once before them, to see whether its head can be taken off
    assert fetched.count("GPTNeoXForCausalLM") == (3 * visits + 1) * count(rested.ref_model)
    # and the evaluation
    assert fetched.count("GPTNeoXForSequenceClassification") == 4 * count(rested.reward_model)
    assert len(wrappers) == 2 and set(away) == {1}
    for wrapper in wrappers:
        assert wrapper.depth == 0
        assert all(p.data is kept or p.data_ptr() == kept.data_ptr() for p, kept in wrapper.weights)


def test_columns_reach_the_reward_function(ppo):
    seen = []

    def bonus(prompts, responses, number, **rest):
        seen.extend(zip(prompts, number))
        assert set(rest) == {"why"}
        return [float(n) for n in number]

    trainer = ppo.trained(
        bonus,
        data=Dataset.from_dict(dict(prompt=PROMPTS, number=range(24), why=["x"] * 24)),
        save_rollouts=True,
        missing_eos_penalty=0.0,
    )
    assert all(PROMPTS[n] == prompt for prompt, n in seen)
    assert sorted(n for _, n in seen) == list(range(24))
    assert (
        [n for r in rollouts(trainer) for n in r.columns["number"]]
        == [n for _, n in seen]
        == [s for r in rollouts(trainer) for s in r.raw_scores.tolist()]
    )


# ---- Metrics, once more in numpy ----


# catches: a mean over the rectangle instead of the real tokens, kl_coef of the wrong update, a
# metric of the shaped reward
@pytest.mark.parametrize(
    ("kl_controller", "kl_estimator"),
    [*(("adaptive", name) for name in ("k1", "k2", "k3", "abs", "full")), ("fixed", "k3")],
)
def test_metrics_are_means_over_what_is_real(ppo, kl_estimator, kl_controller):
    trainer = ppo.trained(
        save_rollouts=True,
        kl_estimator=kl_estimator,
        kl_controller=kl_controller,
        **(dict(kl_target=0.01, kl_horizon=50) if kl_controller == "adaptive" else {}),
        missing_eos_penalty=1.0,
        learning_rate=1e-2,
        num_ppo_epochs=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
    )
    assert len(logs(trainer)) == len(rollouts(trainer)) == 3
    for log, r in zip(logs(trainer), rollouts(trainer)):
        real, logr = r.mask.numpy(), (r.ref_logprobs - r.logprobs).double().numpy()
        kl = (
            dict(
                k1=-logr,
                k2=logr**2 / 2,
                k3=np.exp(logr) - 1 - logr,
                abs=abs(logr),
                full=r.kl.numpy(),
            )[kl_estimator][real].sum()
            / 8
        )
        returns, values = r.returns.numpy()[real], r.values.numpy()[real]
        wanted = {
            "objective/kl": kl,
            "objective/kl_coef": r.objective["kl_coef"],
            "objective/non_score_reward": -r.info["kl_coef"] * kl,
            "objective/entropy": -r.logprobs.numpy()[real].sum() / 8,
            "objective/scores": r.scores.mean().item(),
            "objective/raw_scores": r.raw_scores.mean().item(),
            "objective/rlhf_reward": r.scores.mean().item() - r.info["kl_coef"] * kl,
            "tokens/response_length": real.sum() / 8,
            "val/num_eos_tokens": sum(
                STOP in row[keep].tolist() for row, keep in zip(r.response_ids, r.mask)
            ),
            "val/explained_variance": 1 - (returns - values).var(ddof=1) / returns.var(ddof=1),
            "episode": 8 * (r.info["update"] + 1),
        }
        assert {name: log[name] for name in wanted} == pytest.approx(wanted, abs=1e-5, rel=1e-5)
        assert (r.kl.numpy()[~real] == 0).all()
        assert kl_estimator not in ("k2", "k3", "abs", "full") or kl >= 0
    for r in rollouts(trainer):  # a saved rollout says with which settings it was made
        live = trainer.objective_for(r)
        assert asdict(live) == r.objective and live.kl_estimator == kl_estimator
        assert live.kl_coef == r.info["kl_coef"]
    coefs = [log["objective/kl_coef"] for log in logs(trainer)]
    assert coefs == [0.05] * 3 if kl_controller == "fixed" else coefs[2] > coefs[1]


NAMES = """eps objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg
loss/policy_avg loss/value_avg val/clipfrac_avg val/ratio val/ratio_var val/num_eos_tokens lr episode objective/raw_scores objective/kl_coef val/explained_variance policy/grad_norm
tokens/response_length tokens/per_second time/rollout time/score time/update""".split()


# catches: a metric without a name or a number; raw_scores and scores that are one tensor, which
# safetensors refuses; the value model or the pair in the saved file, names with a prefix, a model
# saved before its last step
def test_a_plain_run_is_logged_kept_and_saved(ppo, letters, tmp_path):
    trainer = ppo.trained(logging_steps=2, save_rollouts=True)
    assert not trainer.args.dataloader_pin_memory  # of which torch would warn on a CPU
    for log in logs(trainer):
        assert not set(NAMES) - set(log) and all(math.isfinite(log[name]) for name in NAMES)
    assert len(rollouts(trainer)) == 3
    trainer.save_model(str(tmp_path / "saved"))
    again, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), torch.arange(12)[None]
    assert torch.equal(again(ids).logits, trainer.model.policy(ids).logits)
    assert type(again) is type(trainer.model.policy)
    names = load_file(tmp_path / "saved" / "model.safetensors")
    assert len(names) == len(list(trainer.model.policy.parameters()))
    assert not any("score" in name or name.startswith(("policy.", "value.")) for name in names)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "saved")("abc").input_ids
        == letters("abc").input_ids
    )
    assert (again.generation_config.eos_token_id, again.generation_config.pad_token_id) == (1, 0)
    assert "ppo" in (tmp_path / "saved" / "README.md").read_text()


# catches: metrics of the sampled entropy in place of the exact one, losses averaged per micro-batch
def test_losses_of_a_first_step_by_hand(ppo):
    sizes = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    sizes |= dict(num_ppo_epochs=1, total_episodes=8)
    objective = dict(missing_eos_penalty=0.0, vf_coef=0.3, entropy_coef=0.2)
    trainer = ppo.trained(learning_rate=0.0, save_rollouts=True, **sizes, **objective)
    log, r = logs(trainer)[0], rollouts(trainer)[0]
    real = r.mask.numpy()
    policy = -r.advantages.numpy()[real].mean()
    value = 0.5 * ((r.values - r.returns).numpy()[real] ** 2).mean()
    logp = [
        (trainer.model.policy(torch.cat([p[pm], a[am]])[None]).logits[0]).log_softmax(-1)[
            int(pm.sum()) - 1 : -1
        ]
        for p, pm, a, am in zip(r.prompt_ids, r.prompt_mask, r.response_ids, r.mask)
    ]
    entropy = -(torch.cat(logp).exp() * torch.cat(logp)).sum(-1).mean().item()
    assert [
        log["loss/policy_avg"],
        log["loss/value_avg"],
        log["policy/entropy_avg"],
    ] == pytest.approx([policy, value, entropy], abs=1e-5)
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(
        policy + 0.3 * value - 0.2 * entropy, abs=1e-4
    )


# ---- Steps and gradients ----


def test_target_kl_stops_the_epochs(ppo, steps):
    ppo(
        learning_rate=1e-1, target_kl=1e-6, num_ppo_epochs=10, num_mini_batches=2, total_episodes=8
    ).train()
    assert 1 < len(steps) < 20


# ---- The loop ----


@pytest.mark.parametrize(
    "settings, updates",
    [
        (dict(total_episodes=24), 3),
        (dict(total_episodes=25), 4),
        (dict(total_episodes=None, num_train_epochs=2), 6),
        (dict(max_steps=5), 5),
    ],
)
def test_how_long_a_run_is(ppo, settings, updates):
    trainer = ppo.trained(**settings, save_rollouts=True, missing_eos_penalty=0.0, num_ppo_epochs=1)
    assert trainer.state.global_step == len(rollouts(trainer)) == updates
    seen = [prompt for r in rollouts(trainer)[:3] for prompt in r.prompts]
    assert sorted(seen) == sorted(PROMPTS) and seen != PROMPTS


def test_stepping_by_hand(ppo, steps):
    trainer = ppo(num_ppo_epochs=4)
    metrics = [trainer.step(PROMPTS[:8]) for _ in range(2)]
    assert (
        len(steps) == 8 and set(NAMES) - set(metrics[0]) == {"eps"} and metrics[1]["episode"] == 16
    )
    r = trainer.advantages(trainer.score(trainer.rollout(PROMPTS[:8])))
    assert math.isfinite(trainer.update(r)["loss/policy_avg"]) and len(steps) == 12


# catches: Trainer's table of losses, which PPO does not log; an alarm that nobody sees
def test_a_notebook_shows_what_to_look_at(ppo, monkeypatch):
    monkeypatch.setattr(loop, "is_in_notebook", lambda: True)
    seen: list[str] = []
    monkeypatch.setattr(notebook.disp, "display", lambda x, **_: seen.append(x._repr_html_()))
    parts = dict(callbacks=[notebook.NotebookProgressCallback()])
    trainer = ppo.trained(parts=parts, num_sample_generations=1)
    assert "value='0' max='3'" in seen[0] and "<th>" not in seen[0]
    heads = re.findall("<th>(.*)</th>", seen[-1])
    assert heads == [*PROGRESS.values(), "sample_score"]
    scores = [f"{log['objective/raw_scores']:.2f}".replace("-", "−") for log in logs(trainer)]
    assert {*scores} <= {*re.findall("<td>(.*)</td>", seen[-1])}
    runaway = [dict.fromkeys(PROGRESS, i) for i in range(40)]
    text = repr(updates_markup("", runaway))
    assert "12 of 40 logs" in text and "▲ Alarm. Update" in text


# catches: a run that ends in silence on an alarm; a trainer that prints its address
def test_a_script_hears_of_an_alarm(ppo, capsys, monkeypatch):
    monkeypatch.setattr(loop, "alarms_of", lambda logs: [f"in {len(logs)} logs"])
    trainer = ppo.trained(disable_tqdm=False, num_sample_generations=3)
    said = capsys.readouterr().out
    assert "\nAlarm. in 7 logs\n" in said and "KL (nats)" in said and "objective/" not in said
    assert said.count("query") == 4 and repr(trainer) == trainer.describe()  # before and after
    trainer.args.disable_tqdm = True
    assert "eval_score" in trainer.generate_completions() and "query" in capsys.readouterr().out
    trainer.eval_dataset, trainer.args.disable_tqdm = None, False
    assert trainer.generate_completions() == {} and "no evaluation" in capsys.readouterr().out
    assert "\n      kl_coef = 0.05: Weight of the KL penalty." in type(trainer.args).__doc__


# catches: rows that are left out, samples that do not come at the end of the run too
def test_completions_keep_every_row(ppo):
    trainer = ppo.trained(total_episodes=40, num_sample_generations=2, num_ppo_epochs=1)
    tables = sorted((Path(trainer.args.output_dir) / "completions").iterdir())
    assert [table.name for table in tables] == [f"update-{n:05d}-sample.csv" for n in (2, 4, 5)]
    frame = pd.read_csv(tables[-1], keep_default_na=False)
    assert list(frame.columns) == ["query", "model response", "score"]
    assert frame["query"].tolist() == PROMPTS[:5]
    assert frame["score"].tolist() == pytest.approx(likes_c([], frame["model response"].tolist()))
    assert trainer.evaluate()["eval_score"] == pytest.approx(frame["score"].mean())


# catches: a sample of the prompts logged under the name of an evaluation, and its table overwritten
def test_a_sample_and_an_evaluation_at_one_step_are_two(ppo):
    prompts = Dataset.from_dict(dict(prompt=(PROMPTS * 3)[:70]))
    settings = dict(num_sample_generations=3, eval_strategy="steps", eval_steps=2)
    trainer = ppo.trained(parts=dict(eval_dataset=prompts), total_episodes=24, **settings)
    steps = lambda name: [log["step"] for log in trainer.state.log_history if name in log]
    assert steps("sample_score") == [1, 2, 3] and steps("eval_score") == [2, 3]
    of = {name: log for log in trainer.state.log_history if log["step"] == 2 for name in log}
    read = lambda kind: pd.read_csv(
        trainer.output_dir / "completions" / f"update-00002-{kind}.csv", keep_default_na=False
    )
    for kind, rows in dict(sample=64, eval=70).items():
        answers = read(kind)["model response"].tolist()
        right = sum(x.count("c") - 0.1 * len(x) for x in answers) / len(answers)
        assert len(answers) == rows and of[f"{kind}_score"][f"{kind}_score"] == pytest.approx(right)


# catches: a schedule that is stepped without the metric it waits for, or that lowers the rate as the
# score rises
def test_a_schedule_that_waits_for_a_score(ppo):
    class Falls(PPOTrainer):
        def evaluate(self, *given, **named):
            score = 4.0 - self.state.global_step
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, dict(eval_score=score)
            )
            return dict(eval_score=score)

    settings = dict(eval_strategy="steps", eval_steps=1, lr_scheduler_type="reduce_lr_on_plateau")
    how = dict(lr_scheduler_kwargs=dict(patience=0, factor=0.5))
    trainer = ppo(kind=Falls, total_episodes=32, **settings, **how)
    assert trainer.args.metric_for_best_model == "eval_score"
    trainer.train()
    assert [log["lr"] for log in logs(trainer)] == [1e-3, 1e-3, 5e-4, 2.5e-4]


# catches: epochs whose left-over prompts are counted as whole batches, so that the last is cut short
def test_epochs_with_prompts_left_over_are_whole(ppo):
    seen = []

    def judge(prompts, responses, **columns):
        seen.append(len(prompts))
        return [0.0] * len(prompts)

    data = Dataset.from_dict(dict(prompt=PROMPTS[:20]))
    settings = dict(total_episodes=None, num_train_epochs=2, dataloader_drop_last=False)
    trainer = ppo.trained(judge, data=data, **settings)
    assert seen == [8, 8, 4, 8, 8, 4] and trainer.args.num_total_batches == 6
    assert [log["episode"] for log in logs(trainer)] == [8, 16, 20, 28, 36, 40]
    assert trainer.state.episode == 40 and trainer.state.epoch == 2
    assert trainer.rollout(PROMPTS[:2]).info["episode"] == 40
    assert ppo(data=data, **settings | dict(total_episodes=28)).args.num_total_batches == 4


# catches: one stream of random numbers for each batch, so that two batches of the same prompts get the
# same responses; predictions that no seed repeats, or that change what the run draws next
@pytest.mark.parametrize("ranks", [1, 2])
def test_predictions_go_by_the_seed(ppo, ranks):
    data, found = Dataset.from_dict(dict(prompt=["abc"] * 16)), []
    for seed in (0, 0, 1):
        trainer = ppo(seed=seed)
        trainer.layout.processes = ranks
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        found.append(trainer.predict(data).predictions)
        assert torch.equal(torch.get_rng_state(), before)
    assert (found[0] == found[1]).all() and found[0].tolist() != found[2].tolist()
    assert found[0][:8].tolist() != found[0][8:].tolist()


# catches: a judge that draws while a run is looked at, and moves what the run draws next
def test_a_look_at_a_judge_that_draws_moves_nothing(ppo):
    numbers = np.random.get_state
    draw = lambda: random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002
    trainer = ppo(lambda prompts, responses, **_: [draw() for _ in responses])
    for look in (trainer.evaluate, lambda: trainer.generate_completions(sampling=True)):
        before = random.getstate(), numbers()[1].tolist(), numbers()[2], torch.get_rng_state()
        look()
        assert before[:3] == (random.getstate(), numbers()[1].tolist(), numbers()[2])
        assert torch.equal(before[3], torch.get_rng_state())


# catches: steps past the schedule that learn nothing, without a word
def test_a_step_past_the_schedule_is_named(ppo, caplog):
    trainer = ppo(total_episodes=16)
    for _ in range(2):
        trainer.step()
    assert "past the schedule" not in caplog.text
    trainer.step()
    assert "update 2 is past the schedule of 2 updates" in caplog.text
    caplog.clear()
    steady = ppo(total_episodes=16, lr_scheduler_type="constant")
    for _ in range(3):
        steady.step()
    assert "past the schedule" not in caplog.text


def test_completions_end_at_stop_strings(ppo):
    assert ppo(stop_strings=list("abcdefghij")).generate_completions()["eval_length"] == 1


# ---- Saving and going on ----

everything = dict(
    total_episodes=40,
    num_mini_batches=2,
    kl_controller="adaptive",
    normalize_scores=True,
    value_learning_rate=3e-3,
    save_strategy="steps",
    save_steps=1,
    logging_steps=1,
)


# catches: random state, optimizer, schedule, order of the data, moments or controller that start
# anew; the draw of a new epoch's order
def test_a_resumed_run_is_the_same_run(ppo):
    whole = ppo.trained(**everything)
    told = lambda trainer: [untimed(log) for log in logs(trainer)]
    for at in (3, 2):  # at the end of an epoch, and in one; it writes those after `at` anew
        again = ppo(**everything)
        again.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / f"checkpoint-{at}"))
        assert again.state.global_step == 5 and told(again)[:at] == told(whole)[:at], at
        assert told(again) == told(whole), at
        assert not unlike(weights(whole), weights(again)), at


def test_a_log_across_the_break_is_the_same(ppo):
    settings = everything | dict(logging_steps=3, total_episodes=24)
    whole, again = ppo(**settings), ppo(**settings)
    whole.train()
    again.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
    assert logs(again)[0]["objective/raw_scores"] == logs(whole)[0]["objective/raw_scores"]


# catches: a resume that falls back in silence, or one checkpoint's damage that spoils the others
def test_a_damaged_checkpoint_is_refused_by_name(ppo):
    check_damaged(ppo)


# catches: a best checkpoint under the name that it has while it is written, other weights at the end
def test_the_best_checkpoint_is_named_and_loaded(ppo):
    settings = dict(metric_for_best_model="eval_score", greater_is_better=True, **BEST)
    trainer = ppo.trained(total_episodes=48, learning_rate=0.2, **settings)
    check_best(trainer, "eval_score", largest=True)
    best = load_file(Path(trainer.state.best_model_checkpoint) / "value" / "model.safetensors")
    now = trainer.model.value.state_dict()
    assert all(torch.equal(now[name], x) for name, x in best.items())


# catches: a state of the run that lost a part, or a name in it that other releases do not know
def test_the_state_of_a_run_is_in_its_checkpoint(ppo):
    trainer = ppo.trained(**everything | dict(total_episodes=16, logging_steps=5))
    folder = Path(trainer.args.output_dir)
    state = json.loads((folder / "checkpoint-1" / "ppo_state.json").read_text())
    names = "controller moments made update_count episode_count since_log"
    assert set(state) == set(names.split())
    assert state["update_count"] == 1 and len(state["since_log"]["objective/kl"]) == 1
    verify(folder / "checkpoint-2", **trainer.identity())


# ---- Bad input ----


def test_bad_models_are_named(ppo, letters):
    policy, two = (tiny_policy(letters, 0, **SIZES) for _ in range(2))
    two = two.config
    two.num_labels = 2
    from transformers import AutoModelForSequenceClassification

    with pytest.raises(ValueError, match="num_labels=2"):
        ppo(AutoModelForSequenceClassification.from_config(two))
    with pytest.raises(ValueError, match="model and ref_model are the same object"):
        ppo(model=policy, parts=dict(ref_model=policy))


# catches: evaluate() that reads the trainer's own prompts whatever it was given
def test_evaluate_reads_what_it_is_given(ppo):
    trainer = ppo()
    assert {"mine_score", "mine_length", "mine_stopped"} == set(
        trainer.evaluate(Dataset.from_dict(dict(prompt=PROMPTS[:3])), metric_key_prefix="mine")
    )
    frame = pd.read_csv(next((Path(trainer.args.output_dir) / "completions").glob("*.csv")))
    assert len(frame) == 3
    with pytest.raises(ValueError, match="eval_dataset"):
        ppo(parts=dict(eval_dataset=None)).evaluate()
