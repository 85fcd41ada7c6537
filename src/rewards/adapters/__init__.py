"""Adapters to trainers and models; nothing in the package imports them."""
