"""Credit that lands on the right tokens of a multi-turn trajectory."""
