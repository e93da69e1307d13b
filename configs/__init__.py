"""The configs of the package. Your own config can import one from here and change some settings."""
