"""What suites cover of the operators that a backend takes: tables, and what they are made of."""
