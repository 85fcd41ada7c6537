"""Measure and steer expert selection in mixture-of-experts models."""
