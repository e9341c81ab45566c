"""The contracts that plugins build against. Importing them loads neither torch nor transformers."""
