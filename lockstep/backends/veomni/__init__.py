"""The engine on VeOmni: its model classes and its way to shard them; the rest is the fsdp2 engine's."""
