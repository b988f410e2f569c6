"""response_logprobs inside and outside of DDP and FSDP2, two processes on CPU: gradients equal
those of one process."""

import sys
import textwrap

import forks
import pytest

WORKER = textwrap.dedent(
    """
    import os, torch, torch.distributed as dist, transformers as tf
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from rlhf_nb.logprobs import response_logprobs

    class Pair(torch.nn.Module):
        "As a trainer has it: the policy inside of what gets wrapped, the function inside of its forward."
        def __init__(self, policy): super().__init__(); self.policy = policy
        def forward(self, *batch): return response_logprobs(self.policy, *batch, chunk_logits=37)

    def make():
        torch.manual_seed(0)
        return tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=37, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, tie_word_embeddings=True))

    def shard(model, root):
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers: fully_shard(layer, mesh=mesh)
        fully_shard(root, mesh=mesh)
        return root

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    prompt_mask, mask = torch.arange(7) >= torch.tensor([[0], [2], [6], [3]]), torch.arange(6) < torch.tensor([[6], [4], [0], [1]])
    batch = (torch.randint(37, (4, 7)), prompt_mask, torch.randint(37, (4, 6)), mask)
    mine = [x[2 * dist.get_rank():][:2] for x in batch]  # ranks hold 10 and 1 real tokens: different numbers of chunks
    alone = make()
    response_logprobs(alone, *batch).logprobs.sum().backward()
    for kind in ("ddp around the pair", "ddp around the policy", "fsdp around the pair", "fsdp around the policy"):
        policy = make()
        inside = kind.endswith("pair")
        root = Pair(policy) if inside else policy
        root = DistributedDataParallel(root) if kind.startswith("ddp") else shard(policy, root)
        got = root(*mine) if inside else response_logprobs(root, *mine, chunk_logits=37)
        got.logprobs.sum().backward()
        for (name, p), q in zip(policy.named_parameters(), alone.parameters()):
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            assert torch.allclose(2 * grad, q.grad, atol=1e-5), (kind, name)  # both average over the two ranks
        if dist.get_rank() == 0: print("right:", kind, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # all is asserted; gloo's threads now and then abort a process that takes itself apart
    """
)


# catches: a wrapper bypassed (gradients not reduced), a head called while its weights are sharded,
# ranks that wait for each other
@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo on one machine")
def test_gradients_over_two_processes(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    done = forks.run(tmp_path / "worker.py", folder=tmp_path, ranks=2)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("right:") == 4
