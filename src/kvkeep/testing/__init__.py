"""The laws as a conformance suite that runs on any policy, and tiny models to run it on."""
