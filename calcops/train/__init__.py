"""A Deep Potential, trained on frames and packaged."""
