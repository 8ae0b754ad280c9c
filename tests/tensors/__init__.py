"""Tests of tensors."""
