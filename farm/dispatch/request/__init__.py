"""What a run is asked for and what it leaves: jobs, plan, budget, intent, ending."""
