"""The transport over SSH, and tunnels to other machines."""
