"""Commands about devices: show, name, lease, open a shell, start virtual ones."""
