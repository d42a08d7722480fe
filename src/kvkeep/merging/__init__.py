"""Pure functions: what is kept and what goes in, new values of what is kept out."""
