"""The classes that a custom hook imports (docs/hooks.md), and the hook `SampleText`."""

from parallel2d.training.hooks import Hook, HookResult, RunView, SampleText

__all__ = ["Hook", "HookResult", "RunView", "SampleText"]
