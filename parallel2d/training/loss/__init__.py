"""The summed loss of a micro-batch, whatever a model gives: `model_loss.ModelLoss`; and what a loss
that is not ours was divided by: `rule.find_rule`."""
