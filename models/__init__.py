"""Models as ``nn.Module``, with their tensor-parallel plans.

The models import only the checked JSON reader of parallel2d.
"""
