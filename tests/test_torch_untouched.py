"""Importing and using the package leaves torch as it was: the identity of its public names in
fresh processes.
"""

import copyreg
import gc
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 4
SIZES = {
    "hybrid": {"replicate": 2, "shard": 2},
    "zero2": {"replicate": 1, "shard": 4},
    "zero3": {"replicate": 1, "shard": 4},
    "hybrid_zero2": {"replicate": 2, "shard": 2},
    "hybrid_full": {"replicate": 2, "shard": 2},
    "ddp": {"replicate": 4, "shard": 1},
}
# Jobs of a process by name: a strategy, sizes of the mesh
JOBS = {
    "short": [("hybrid_full", {"replicate": 2, "shard": 1})],
    "strategies": list(SIZES.items()),
    "context": [("hybrid", {"replicate": 1, "shard": 2, "context": 2})],
}


def identities():
    """Return the objects behind torch's public names by name, and the state of process-wide hooks
    and modes.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import DTensor
    from torch.optim import optimizer

    found = {}
    for module in (torch, torch.autograd, dist, torch.optim, nn, nn.functional, nn.utils, nn.init):
        for name in vars(module):
            if not name.startswith("_"):
                found[f"{module.__name__}.{name}"] = vars(module)[name]
    kinds = [each for each in vars(torch.optim).values() if inspect.isclass(each)]
    for kind in (DTensor, torch.Tensor, nn.Module, nn.Linear, torch.cuda.Stream, dist.Work, *kinds):
        for name in dir(kind):
            # torch makes the cache of abstract classes and similar objects on the first request.
            if not name.startswith("_") or name in ("__reduce_ex__", "__getattr__", "__init__"):
                found[f"{kind.__name__}.{name}"] = inspect.getattr_static(kind, name)
    found["handlers"] = frozenset(DTensor._op_dispatcher._custom_op_handlers)
    found["copyreg"] = copyreg.dispatch_table.get(DTensor)
    found["modes"] = torch._C._len_torch_function_stack()
    found["hooks"] = len(optimizer._global_optimizer_pre_hooks)
    return found


def changes(before, ignored=()):
    """The names of ``before`` that are another object now. Numbers are compared as such."""
    now = identities()
    same = ("handlers", "modes", "hooks")
    return [
        name
        for name, value in before.items()
        if name not in ignored and (now[name] != value if name in same else now[name] is not value)
    ]


def main(rank, ranks, folder, job):
    import torch
    import torch.distributed as dist
    from torch import nn

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for kind in vars(torch.optim).values():
        # torch itself replaces the step of a class when one is built for the first time.
        if inspect.isclass(kind) and kind is not torch.optim.Optimizer:
            kind([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    before = identities()

    from checkpoint_runs import build, train_step

    import parallel2d
    from parallel2d.training.metrics.communication import CommunicationMeter

    for number, (strategy, sizes) in enumerate(JOBS[job]):
        mesh, model, optimizer = build(sizes, {"strategy": strategy})
        meter = CommunicationMeter(mesh).install()
        checkpointer = parallel2d.Checkpointer(
            parallel2d.CheckpointConfig(every=1), f"{folder}/{number}", mesh, model, optimizer
        )
        for step in range(1, STEPS + 1):
            meter.start()
            train_step(model, optimizer, mesh, step)
            meter.read()
            checkpointer.save_if_due(step, {"samples": 8 * step}, last=step == STEPS)
            # Only hooks of all optimizers stay for as long as the model is alive.
            allowed = ("hooks", "modes") if step < 2 else ("hooks",)
            assert not changes(before, allowed), f"{strategy}, step {step}: {changes(before)}"
        checkpointer.finish()
        meter.remove()
        assert identities()["hooks"] == before["hooks"] + 1
        del mesh, model, optimizer, meter, checkpointer
        gc.collect()
        assert not changes(before), f"{strategy}, at the end: {changes(before)}"
    # Through the store: a rank that exits right after a barrier resets connections which another
    # rank still reads from.
    store.set(f"finished/{rank}", "")
    store.wait([f"finished/{each}" for each in range(ranks)])
    os._exit(0)


def _run(folder, job, ranks):
    """Run ``job`` in fresh processes, and return the output of the failed processes."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(ranks):
        words = [sys.executable, __file__, str(rank), str(ranks), str(folder), job]
        processes.append(
            subprocess.Popen(
                words,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
    told = [process.communicate()[1] for process in processes]
    codes = [process.returncode for process in processes]
    return [text[-3000:] for text, code in zip(told, codes, strict=True) if code]


def test_torch_is_unchanged_during_and_after_training(tmp_path):
    assert not _run(tmp_path, "short", 2)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["strategies", "context"])
def test_torch_is_unchanged_with_each_strategy_and_a_context_axis(tmp_path, job):
    assert not _run(tmp_path, job, 4)


def test_function_mode_stays_while_torch_looks_for_it():
    """The garbage collector may free a model between torch's check for function modes and its use
    of a mode.
    """
    import torch

    from parallel2d.parallel.parallelize import script_checks

    before = torch._C._len_torch_function_stack()
    script_checks.function_mode.activate(list, lambda _: None)
    inside = compile("freed()", str(Path(torch.__file__).with_name("inside.py")), "exec")
    exec(inside, {"freed": script_checks._deactivate_unused})
    assert torch._C._len_torch_function_stack() == before + 1
    gc.collect()
    assert torch._C._len_torch_function_stack() == before


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
