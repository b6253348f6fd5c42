"""What a layout costs, as arithmetic: bytes per axis and FLOPs. Nothing here measures."""
