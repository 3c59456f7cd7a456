"""Tensors for Core ML: their memory, and which slot of them holds which token."""
