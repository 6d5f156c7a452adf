"""The machinery of calcops_jit. Nothing here is public; the public names are in calcops_jit.py."""
