"""Tests of gtp_dtensor and of its torchtitan integration."""
