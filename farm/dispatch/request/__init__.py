"""Request of a run and its records: job selection, plan, budget, intent, ending."""
