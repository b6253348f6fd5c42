"""Parity check of a layout for a model. A few training steps are compared with a reference run in
one process, parameter by parameter. Every collective is compared with the configured dtypes and the
predicted bytes.

``python -m parallel2d.certify <overrides of train>`` and `certify` in code return a `ParityReport`.
"""
