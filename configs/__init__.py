"""The configs of the package. Your config can start from one by importing it from here."""
