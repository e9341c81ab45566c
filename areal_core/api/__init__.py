"""The contracts that plugins build against. Importing any module of this package loads neither torch nor transformers."""
