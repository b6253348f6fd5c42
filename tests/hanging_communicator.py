"""A communicator on CPU that behaves as NCCL; `install` replaces gloo's communicator with it.

A collective completes on a stream: its result appears only after the host has seen the completion.
With a dead peer a collective hangs for ever, without an error. After `abort` it is done, with
undefined outputs, and its error is known before that. The next quorum needs the abort of all
collectives in flight. ``revokes``: half of the collectives abort without a request when the
network reports a loss, as a watchdog does.
"""

import os
import random
import sys
import threading
import time

import torch

from parallel2d.base.replicas import communicators
from parallel2d.base.replicas.communicators import Collective, Gloo

# Collectives of gloo that still run after their abort. The destructor of their group would wait for
# them.
_RUNNING = []


class Hanging(Gloo):
    revokes = False

    def __init__(self):
        super().__init__()
        self._flights = []

    def start(self, name, *arguments):
        pairs = []
        copies = _copied(list(arguments), pairs)  # late messages write to them
        try:
            real = super().start(name, *copies)
        except RuntimeError:  # gloo knows of the loss already, and NCCL would not
            real = None
        flight = Flight(real, pairs, self.revokes and random.random() < 0.5)
        self._flights = [each for each in self._flights if not each.is_over]
        self._flights.append(flight)
        return flight

    def use(self, connected):
        if any(not each.is_over for each in self._flights):
            print(
                "a communicator was reconfigured before it was revoked", file=sys.stderr, flush=True
            )
            os._exit(1)
        super().use(connected)

    def abort(self):
        for each in self._flights:
            each.abort()
        super().abort()


class Revoking(Hanging):
    revokes = True


class Flight(Collective):
    def __init__(self, real, pairs, revokes):
        super().__init__(None, real)
        self._real, self._pairs, self._revokes = real, pairs, revokes
        self._lock = threading.Lock()
        self.is_over = self._is_aborted = False

    def is_done(self):
        with self._lock:
            if not self.is_over and self._real is not None and self._real.is_done():
                if not self._real.has_failed():
                    for copy, target in self._pairs:
                        target.copy_(copy)
                    self.is_over = True
                elif self._revokes:
                    self._end_without_result()
            return self.is_over

    def has_failed(self):
        return self._is_aborted

    def wait(self):
        """Wait on the stream and synchronize the host later, until replicas can be lost."""
        while not self.is_done():
            time.sleep(0.0005)

    def abort(self):
        with self._lock:
            if not self.is_over:
                self._end_without_result()

    def _end_without_result(self):
        self._is_aborted = True
        _RUNNING[:] = [each for each in _RUNNING if not each.is_done()]
        if self._real is not None:
            _RUNNING.append(self._real)
        for _, target in self._pairs:
            if random.random() < 0.5:  # otherwise a missing result would not be visible
                values = (
                    torch.randn(target.shape)
                    if target.is_floating_point()
                    else torch.randint(0, 100, target.shape)
                )
                target.copy_(values)
        self.is_over = True


def _copied(given, pairs):
    """``given`` with copies of its tensors, which ``pairs`` then has with the originals."""
    if isinstance(given, torch.Tensor):
        pairs.append((given.clone(), given))
        return pairs[-1][0]
    return [_copied(each, pairs) for each in given] if isinstance(given, list | tuple) else given


def install(kind):
    communicators.BACKENDS["gloo"] = lambda *_: kind()
