"""The study of a design space: mechanisms beside a policy, screened cheaply and then tested strictly."""
