"""`model_loss.ModelLoss` computes the summed loss of a micro-batch for any model output.
`rule.find_rule` finds the divisor of a custom loss."""
