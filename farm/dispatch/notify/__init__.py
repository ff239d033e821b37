"""Messages to people: webhooks, mail and the secrets that they need."""
