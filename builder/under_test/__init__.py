"""Files that run in the environment under test: standard library, and pytest for the plugin."""
