"""Plain ``nn.Module`` models, each with its tensor-parallel plan.

The models import only the checked JSON reader of parallel2d.
"""
