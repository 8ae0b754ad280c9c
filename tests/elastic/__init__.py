"""Tests of elastic."""
