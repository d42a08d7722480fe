"""The nouns that rooms exchange: budget, view, decision, traits, policy, errors."""
