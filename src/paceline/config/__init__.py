"""From a TOML file and `--set key=value` to a `Config`, and back."""

from paceline.config.load import config_from, dump_config, load_config, with_versions

__all__ = ["config_from", "dump_config", "load_config", "with_versions"]
