"""Grade-school math word problems (GSM8K, arXiv:2110.14168): dataset and reward."""
