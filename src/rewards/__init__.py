"""What a rollout earned, component by component."""
