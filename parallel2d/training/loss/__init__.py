"""Computes the summed loss of a micro-batch for any model: `model_loss.ModelLoss`. For a custom
loss, `rule.find_rule` finds its divisor."""
