"""Plain ``nn.Module`` models, each with its tensor-parallel plan beside it. Nothing here imports
parallel2d."""
