"""areal-vllm: the inference engine of AReaL that talks to vLLM servers."""
