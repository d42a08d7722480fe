"""Introduces model, cache and policy to each other, inside transformers."""
