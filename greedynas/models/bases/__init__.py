"""Pretrained networks as bases: their weights, the space around them, and how fine-tuning and a supernet start from them."""
