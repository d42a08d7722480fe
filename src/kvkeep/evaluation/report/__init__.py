"""What runs have shown: numbers, tables, and a page that needs nothing but a browser."""
