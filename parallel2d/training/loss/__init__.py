"""Computes the summed loss of a micro-batch for the output of any model, `model_loss.ModelLoss`.
For a custom loss, `rule.find_rule` finds the divisor."""
