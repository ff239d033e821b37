"""Who has which device: the rules, pure, and the rows."""
