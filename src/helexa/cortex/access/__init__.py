"""Authentication, authorization and per-key limits of requests."""
