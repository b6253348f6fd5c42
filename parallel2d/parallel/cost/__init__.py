"""Predictions for a layout: bytes per axis, FLOPs, memory, seconds. Nothing is measured."""
