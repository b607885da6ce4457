"""The Python face: what notebooks use, under the names that Unsloth and TRL users type."""
