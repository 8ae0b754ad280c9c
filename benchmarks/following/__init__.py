"""Measures how fast versions of weights reach followers, and what that costs the publisher."""
