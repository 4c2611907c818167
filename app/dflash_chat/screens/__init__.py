"""What opens over the conversation."""
