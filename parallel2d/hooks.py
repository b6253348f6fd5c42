"""What a hook of one's own imports (docs/hooks.md): `Hook`, `HookResult`, `RunView`."""

from parallel2d.training.hooks import Hook, HookResult, RunView

__all__ = ["Hook", "HookResult", "RunView"]
