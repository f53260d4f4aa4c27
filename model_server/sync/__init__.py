"""`model-server lora-sync`: a sidecar that makes a server's LoRA adapters equal a file."""
