"""Is a layout right for a model? A few steps on it are compared with one process, parameter by
parameter, and every collective with the policy.

``python -m parallel2d.certify <overrides of train>`` and `certify` in code make a `ParityReport`.
"""
