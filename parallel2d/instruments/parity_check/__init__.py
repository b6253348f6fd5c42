"""Parity check of a layout for a model: a few steps are compared with a reference run in one
process, parameter by parameter, and every collective with the policy.

``python -m parallel2d.certify <overrides of train>`` and `certify` in code return a `ParityReport`.
"""
