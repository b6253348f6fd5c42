"""Is a layout right for a model? A few steps on it are compared with one process, parameter by
parameter, and every collective with the policy.

``python -m parallel2d.certify <overrides of train>`` and `certify` in code make a `Certificate`.
"""

from parallel2d.instruments.certification.certificate import Certificate
from parallel2d.instruments.certification.in_code import certify
from parallel2d.instruments.certification.training_job import certify_job

__all__ = ["Certificate", "certify", "certify_job"]
