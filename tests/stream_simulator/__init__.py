"""A simulator of CUDA streams: runs a CUDA program of PyTorch on CPU tensors and checks its stream
order.

`install` makes torch report CUDA devices. Operators run at once on the CPU, so values are correct.
Vector clocks (`clocks`) check the order that the program has requested. The kinds of findings:

* ``race``: two accesses of the same bytes, at least one of them a write, without an event, a wait
  for a stream, a ``work.wait()`` or a wait of the host between them;
* ``reuse``: memory is freed while another stream may still use it, and the caching allocator may
  give it to a later allocation on its stream, which uses it first. ``record_stream`` and a kept
  reference prevent this;
* ``early free``: the same without such an allocation in this run. Another run could have one,
  because the stream does not always wait for the other one before it allocates;
* ``host race``: the host accesses memory of a copy that it has not waited for;
* ``mismatch``: an operator or a collective gets tensors of the host and of the device;
* ``no-op wait``: a wait for an event that was never recorded. `torch.Stream.wait_event` of a
  `torch.cuda.Event` is one.

The simulator also counts the waits of the host, with the operators outstanding at that moment, and
the kernels by the source file that issued them. One process simulates one device. The page
docs/gpu.md lists the limits of the simulation.
"""

from stream_simulator.simulator import Simulator, install

__all__ = ["Simulator", "install"]
