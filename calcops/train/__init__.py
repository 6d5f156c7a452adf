"""Deep Potentials and NEPs, trained on frames and packaged."""
