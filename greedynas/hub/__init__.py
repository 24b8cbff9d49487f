"""Publish trained networks on the Hugging Face hub, and fetch them from there."""
