"""`model-server lora-sync`: a sidecar that gives a server the LoRA adapters that a file lists."""
