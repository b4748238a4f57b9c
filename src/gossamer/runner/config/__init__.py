"""Configs of the runner: a typed schema, and files that are loaded into it."""

from gossamer.runner.config.loading import Loaded, config_of, config_text, read_config
from gossamer.runner.config.overlays import task_of
from gossamer.runner.config.schema import Config

__all__ = ["Config", "Loaded", "config_of", "config_text", "read_config", "task_of"]
