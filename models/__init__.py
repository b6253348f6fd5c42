"""Plain ``nn.Module`` models, each with its tensor-parallel plan.

Of parallel2d they use only the checked reading of JSON files.
"""
