"""Cost of a layout as arithmetic: bytes per axis, memory, seconds and FLOPs. No module of this
package measures a run."""
