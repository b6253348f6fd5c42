"""Process groups whose inside is exchanged with every generation: `World`, `Across`, `Everyone`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d


class ReplicaLost(RuntimeError):  # noqa: N818 (named after what happened)
    """What was sent to other replicas did not arrive: one of them is gone."""


class _Ended(dist.Work):
    def wait(self, *_: Any) -> bool:
        return True

    is_completed = is_success = wait


class PolledWork(dist.Work):
    """A collective across replicas. `wait` returns without a result once one of them is lost."""

    def __init__(self, replicas: Any, group: Any, work: Any, kept: Any) -> None:
        super().__init__()
        self._parts = replicas, group, work, kept

    def wait(self, *_: Any) -> bool:
        replicas, *parts = self._parts
        return replicas.finish(*parts)

    def is_completed(self) -> bool:
        return bool(self._parts[2].is_completed())


class _Lasting(ProcessGroup):
    """A group whose inside is exchanged. Torch keeps names in a backend, which this has not."""

    label = about = ""

    def __init__(self, replicas: Any, key: str, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.replicas, self.key = replicas, key
        self.inner: Any = None

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.label = str(name)

    def getGroupName(self) -> str:  # noqa: N802
        return self.label

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self.about = text

    def getGroupDesc(self) -> str:  # noqa: N802
        return self.about

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner

    def shutdown(self) -> None:
        self.inner = None

    def members(self) -> list[int]:
        """The ranks in it that are there, in their order inside."""
        return self.replicas.present

    def connect(self, store: Any, timeout: timedelta) -> Any:
        """A group of those that are there. Blocks until all of them do so."""
        ranks = self.members()
        return ProcessGroupGloo(store, ranks.index(self.replicas.rank), len(ranks), timeout)

    def run(self, name: str, *arguments: Any) -> Any:
        """Starts the collective ``name`` of the group inside."""
        if not self.replicas.on:
            return getattr(self.inner, name)(*arguments)
        return self.replicas.begin(self.inner, name, arguments)


class Across(_Lasting):
    """The replicate axis: the ranks in this place of each replica."""

    def members(self) -> list[int]:
        replicas = self.replicas
        return [replicas.ranks[number][replicas.place] for number, _ in replicas.members]

    def size(self) -> int:
        return len(self.members())

    def rank(self) -> int:
        return self.members().index(self.replicas.rank)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self.run("allreduce", tensors, opts or dist.AllreduceOptions())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.run("allgather", outputs, inputs, opts or c10d.AllgatherOptions())

    def _allgather_base(self, output: Any, own: Any, opts: Any = None) -> Any:
        return self.run("_allgather_base", output, own, opts or c10d.AllgatherOptions())

    def alltoall_base(self, output: Any, own: Any, *sizes: Any) -> Any:
        return self.run("alltoall_base", output, own, *sizes)

    def barrier(self, opts: Any = None) -> Any:
        return self.run("barrier")


class World(_Lasting):
    """The default group: in the name of the whole job, among those ranks that are there. Results by
    rank, of a gather, keep what they held of those that are not."""

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        if self.replicas.in_step:
            work = self.run("allreduce", tensors, opts)
            self.replicas.arrived = work.wait()
            return _Ended()
        return self._settle(tensors, lambda group: group.allreduce(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts, (own,) = opts or c10d.AllgatherOptions(), inputs

        def gather(group: Any) -> Any:
            return group.allgather([[outputs[0][rank] for rank in self.members()]], [own], opts)

        return self._settle(outputs[0], gather)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:  # type: ignore[override]
        (own,) = inputs
        # All get what one asks for, so that whoever is left can tell.
        held = outputs[0] if outputs else [torch.empty_like(own) for _ in range(self.size())]
        return self.allgather([held], [own])

    def broadcast(self, tensors: Any, opts: Any) -> Any:  # type: ignore[override]
        root = opts.rootRank
        inside = dist.BroadcastOptions()

        def send(group: Any) -> Any:
            inside.rootRank = self.members().index(root)
            return group.broadcast(tensors, inside)

        return self._settle(tensors, send)

    def barrier(self, opts: Any = None) -> Any:
        return self._settle([], lambda group: group.barrier())

    def _settle(self, results: Sequence[Tensor], start: Callable[[Any], Any]) -> Any:
        self.replicas.settle(self, results, start)
        return _Ended()

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        group_name: Any = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> Any:
        """Torch calls this for every group, so for each row of a mesh too."""
        if self.rank() not in ranks:
            return None
        group = self.replicas.new_group(list(ranks), str(group_name), group_desc or "", timeout)
        # Torch registers the name and leaves this to us.
        group._set_group_name(group_name)
        group._set_group_desc(group_desc or "group")
        return group


class Everyone(World):
    """As `World`, for a thread beside the loop: what loses a replica raises `ReplicaLost`."""

    def _settle(self, results: Sequence[Tensor], start: Callable[[Any], Any]) -> Any:
        replicas, group = self.replicas, self.inner
        if not replicas.on:
            start(group).wait()
        elif not replicas.begin(group, start, (results,)).wait():
            raise ReplicaLost("a replica was lost")
        return _Ended()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        return self._settle(tensors, lambda group: group.allreduce(tensors, opts))


class NotArrived(_Ended):
    def wait(self, *_: Any) -> bool:
        return False
