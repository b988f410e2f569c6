"PPOTrainer on two real processes (gloo): equal weights on both, saving, LoRA, resume, and the numbers of one process on the same rollout."
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_nb.rollout import Rollout

WORKER = textwrap.dedent(
    '''
    "Both the two processes and, alone, the one that they are compared with: python worker.py FOLDER KIND."
    import json, os, sys, time
    from pathlib import Path
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from rlhf_nb.models import load_policy, load_tokenizer
    from rlhf_nb.rollout import Rollout
    from rlhf_nb.trainer import PPOConfig, PPOTrainer

    folder, kind = Path(sys.argv[1]), sys.argv[2]
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    lora = lambda task: LoraConfig(r=2, target_modules=["query_key_value", "dense_h_to_4h"], task_type=task)
    parts = dict(plain={}, lora=dict(peft_config=lora("CAUSAL_LM"), value_peft_config=lora("SEQ_CLS")), trunk={})[kind]
    prompts = [f"tell {i} of {chr(97 + i % 20)}" for i in range(24)]
    likes_a = lambda prompts, responses, **columns: [response.count("a") - 0.1 * len(response) for response in responses]

    def make(out, **changes):
        settings = dict(use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4 // ranks, num_mini_batches=2, total_episodes=24,
                        response_length=6, temperature=1.0, learning_rate=1e-2, num_sample_generations=1, save_rollouts=True, save_strategy="steps", save_steps=1, seed=5, share_value_trunk=kind == "trunk")
        data, tests = Dataset.from_dict(dict(prompt=prompts)), Dataset.from_dict(dict(prompt=prompts[:5]))
        return PPOTrainer(PPOConfig(str(folder / out), **settings | changes), load_tokenizer(str(folder / "base")), str(folder / "base"), reward_model=likes_a, train_dataset=data, eval_dataset=tests, **parts)

    def everything(trainer): return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    def told(trainer): return [{k: v for k, v in log.items() if not k.startswith(("time/", "tokens/per", "eps", "train_"))} for log in trainer.state.log_history]

    whole = make("whole")
    whole.train()
    whole.save_model(str(folder / "saved"))
    assert whole.accelerator.num_processes == ranks and whole.state.global_step == 3
    start = everything(make("unused"))
    assert (everything(whole) - start).abs().max() > 1e-3
    if ranks > 1:
        for other in whole.accelerator.gather(everything(whole)[None]): assert torch.equal(other, everything(whole)), "the ranks went apart"
    again = make("again")
    again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-1"))
    assert torch.equal(everything(again), everything(whole)) and told(again) == told(whole), "resumed is another run"

    # The same rollout, whatever the number of processes: the numbers of the update must be the same.
    alone = make("alone", optim="sgd", learning_rate=0.1, num_mini_batches=1, num_ppo_epochs=2, kl_coef=0.3, entropy_coef=0.1, normalize_scores=True, whiten_rewards=True, save_strategy="no",
                 per_device_train_batch_size=int(os.environ.get("MICRO", 2)), gradient_accumulation_steps=8 // ranks // int(os.environ.get("MICRO", 2)))
    if ranks == 1: alone.rollout(prompts[:8]).save(folder / "replay.safetensors")
    r = Rollout.load(folder / "replay.safetensors").select(range(rank * 8 // ranks, (rank + 1) * 8 // ranks))
    ready = alone.advantages(alone.score(r))
    metrics = alone.update(ready)
    ready.save(folder / f"ready-{kind}-{ranks}-{rank}-{os.environ.get('MICRO', 2)}.safetensors")
    if rank == 0:
        torch.save(dict(weights=everything(alone), start=start, metrics=metrics), folder / f"found-{kind}-{ranks}-{os.environ.get('MICRO', 2)}.pt")
        torch.save(whole.model.policy.eval()(torch.arange(3, 12)[None]).logits, folder / f"logits-{kind}-{ranks}.pt")
        print("right:", kind, flush=True)
    if ranks > 1:
        whole.accelerator.wait_for_everyone()
        os._exit(0)  # all is asserted; gloo's threads now and then abort a process that takes itself apart
    '''
)


def run(folder: Path, kind: str, ranks: int, micro: int = 2) -> None:
    (folder / "worker.py").write_text(WORKER)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    env = dict(os.environ, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="", MICRO=str(micro))
    done = subprocess.run([sys.executable, *launcher, str(folder / "worker.py"), str(folder), kind], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0 and f"right: {kind}" in done.stdout, done.stderr[-4000:]


@pytest.fixture(scope="module", params=["plain", "lora", "trunk"])
def both(request, tmp_path_factory):
    "A folder in which one process and two have trained, and the kind of the model."
    from rlhf_nb.models import tiny_policy, train_tokenizer
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    tokenizer = train_tokenizer([f"tell {i} of {chr(97 + i % 20)}" for i in range(24)])
    policy = tiny_policy(tokenizer, 0, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16)
    with torch.no_grad(): policy.gpt_neox.final_layer_norm.bias += 8 * policy.get_output_embeddings().weight[1]  # now and then it stops
    policy.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    for ranks in (1, 2):
        for name in ("whole", "again", "saved"):
            if (folder / name).exists(): (folder / name).rename(folder / f"{name}-1")
        run(folder, kind, ranks)
    return folder, kind


# catches (with the assertions in the worker): ranks that go apart, a save by both ranks at once or by a wrapped model, a resume that forgets a rank's random state
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_fault_13_saving_and_lora_under_two_processes(both):
    folder, kind = both
    names, ids = {path.name for path in (folder / "saved").iterdir()}, torch.arange(3, 12)[None]
    if kind == "lora":
        from peft import AutoPeftModelForCausalLM as Loader
        assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    else: Loader = AutoModelForCausalLM
    assert torch.equal(Loader.from_pretrained(folder / "saved")(ids).logits, torch.load(folder / f"logits-{kind}-2.pt"))
    assert AutoTokenizer.from_pretrained(folder / "saved").pad_token_id == 0 and "README.md" in names
    names = {path.name for path in (folder / "whole" / "checkpoint-3").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "manifest.json", "ppo_state.json"} <= names and not list((folder / "whole").glob("*.partial"))


# catches: rows written twice or not at all, both ranks drawing the same prompts
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_rollouts_and_completions_are_written_once(both):
    folder, _ = both
    files = sorted((folder / "whole" / "rollouts").iterdir())
    assert [path.stem for path in files] == [f"update-{n:05d}-rank{rank}" for n in range(3) for rank in range(2)]
    prompts = [prompt for path in files for prompt in Rollout.load(path).prompts]
    assert len(prompts) == 24 and len(set(prompts)) == 24
    tables = list((folder / "whole" / "completions").glob("*.csv"))
    assert len(tables) == 1 and len(tables[0].read_text().strip().splitlines()) >= 6
    state = json.loads((folder / "whole" / "checkpoint-3" / "trainer_state.json").read_text())
    one = json.loads((folder / "whole-1" / "checkpoint-3" / "trainer_state.json").read_text())
    assert [log["episode"] for log in state["log_history"] if "episode" in log] == [log["episode"] for log in one["log_history"] if "episode" in log] == [8, 16, 24]


# catches: a loss divided per rank, whitening per rank, running moments per rank, a metric of one rank alone, a gradient averaged once too often
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
@pytest.mark.parametrize("micro", [2, 1])
def test_two_processes_compute_what_one_does(both, micro):
    folder, kind = both
    if micro != 2:
        if kind != "plain": pytest.skip("one kind of model is enough for half the micro-batch")
        for name in ("whole", "again"): (folder / name).rename(folder / f"{name}-2")
        run(folder, kind, 2, micro)
    one, two = (torch.load(folder / f"found-{kind}-{n}-{m}.pt", weights_only=False) for n, m in ((1, 2), (2, micro)))
    assert torch.equal(one["start"], two["start"]) and (one["weights"] - one["start"]).abs().max() > 1e-3
    torch.testing.assert_close(two["weights"], one["weights"], atol=1e-5, rtol=0)
    assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-5, rel=1e-5) and len(one["metrics"]) > 15
    whole = Rollout.load(folder / f"ready-{kind}-1-0-2.safetensors")
    parts = [Rollout.load(folder / f"ready-{kind}-2-{rank}-{micro}.safetensors") for rank in range(2)]
    assert {int(part.mask.sum()) for part in parts} != {int(whole.mask.sum()) // 2}  # ranks with other numbers of tokens
    for name in ("scores", "rewards", "advantages", "returns"):
        torch.testing.assert_close(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name), atol=1e-5, rtol=0)
