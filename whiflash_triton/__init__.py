"""Lossless speculative decoding that routes every round between two drafting paradigms."""
