"""Cost of a layout as arithmetic: bytes per axis, FLOPs, memory, seconds. Nothing is measured."""
