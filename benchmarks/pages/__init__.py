"""What pages show that is made by a command."""
